"""The tokens of a text file, by a model's own tokenizer."""

from pathlib import Path

from torch import nn

from sinkwise.data.text import text
from sinkwise.errors import InputError
from sinkwise.hosts.loading.source import source_of


def text_tokens(model: nn.Module, path: Path, count: int) -> list[int]:
    """The first `count` tokens of a UTF-8 file, after the tokenizer's own prefix.

    Raises InputError for a model without a tokenizer, and for a text that is shorter.
    """
    source = source_of(model)
    if source is None or source.tokenizer is None:
        raise InputError(f"text needs a tokenizer, and {type(model).__name__} has none")
    windows = text(path, length=count, samples=1).batches(source.tokenizer)
    return next(windows)["input_ids"][0].tolist()
