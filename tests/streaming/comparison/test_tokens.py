"""The tokens of a text file."""

from pathlib import Path
from typing import Any

import pytest

from sinkwise.errors import InputError
from sinkwise.hosts.loading.source import Source, register
from sinkwise.streaming.comparison.tokens import text_tokens
from tests.tokenizers import word_tokenizer

from ..families import build


def test_the_first_tokens_between_the_special_ones(tmp_path: Path) -> None:
    words = ["the", "sink", "draws", "attention"] * 5
    tokenizer: Any = word_tokenizer(words)
    model = build("llama")
    register(model, Source("tiny", tokenizer, None))
    file = tmp_path / "book.txt"
    file.write_text(" ".join(words))
    ids = tokenizer(" ".join(words))["input_ids"]
    assert text_tokens(model, file, 9) == [*ids[:8], tokenizer.sep_token_id]
    with pytest.raises(InputError, match="20 tokens"):
        text_tokens(model, file, 30)


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="needs a tokenizer"):
        text_tokens(build("llama"), tmp_path / "book.txt", 9)
