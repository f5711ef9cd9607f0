"""Windows of a text against the tokenization of the whole text."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from sinkwise.data import text as module
from sinkwise.data.text import text
from sinkwise.errors import InputError

LLAMA3 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Each has a place between two words, so that a piece of 64 characters always has one too.
CHUNKS = (
    "alpha beta",
    "gamma delta.\n\n",
    "x y, 123  ",
    "été neuf!\n",
    " don't do ",
    "a b\t",
    "c d ",
)
CORPUS = [chunk * 7 for chunk in CHUNKS]


def bpe(kind):
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    if kind == "gpt2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif kind == "llama3":
        split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    else:  # Llama 2: a space of its own before any text
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        tokenizer.decoder = decoders.Metaspace()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind != "llama2" else []
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=alphabet,
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def words(*, around=True):
    """As BERT: one token per word, between [CLS] and [SEP]."""
    vocabulary = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "word": 3, "a": 4, "b": 5}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if around:
        tokenizer.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


TOKENIZERS = {kind: bpe(kind) for kind in ("gpt2", "llama3", "llama2")} | {
    "words": words(around=False)
}


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chunks=st.lists(st.sampled_from(CHUNKS), min_size=8, max_size=60), length=st.integers(2, 7))
def test_windows_are_the_start_of_the_whole_tokenization(
    kind, tmp_path, monkeypatch, chunks, length
):
    monkeypatch.setattr(module, "PIECE_CHARACTERS", 64)
    tokenizer, file = TOKENIZERS[kind], tmp_path / "text.txt"
    file.write_text("".join(chunks), encoding="utf-8")
    whole = tokenizer("".join(chunks), add_special_tokens=False)["input_ids"]
    inputs = text(file, length=length, samples=10_000, batch_size=3)
    ids = torch.cat([batch["input_ids"] for batch in inputs.batches(tokenizer)])
    count = len(whole) // length
    assert ids.shape == (count, length)
    assert ids.flatten().tolist() == whole[: count * length]


def test_the_comparison_can_fail(tmp_path, monkeypatch):
    """A cut that is not between words gives other tokens."""
    monkeypatch.setattr(module, "PIECE_CHARACTERS", 7)
    monkeypatch.setattr(module, "_cut", len)
    file = tmp_path / "text.txt"
    file.write_text("alpha beta gamma delta " * 5)
    whole = TOKENIZERS["gpt2"](file.read_text(), add_special_tokens=False)["input_ids"]
    (batch,) = text(file, length=len(whole), samples=1).batches(TOKENIZERS["gpt2"])
    assert batch["input_ids"][0].tolist() != whole


def test_special_tokens_stand_around_every_window(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("word a b " * 20)
    batches = list(text(file, length=5, samples=7, batch_size=2).batches(words()))
    assert [batch["input_ids"].shape for batch in batches] == [(2, 5)] * 3 + [(1, 5)]
    ids = torch.cat([batch["input_ids"] for batch in batches])
    assert ids.dtype == torch.int64
    assert (ids[:, 0] == 1).all() and (ids[:, -1] == 2).all()
    assert ids[:2].tolist() == [[1, 3, 4, 5, 2], [1, 3, 4, 5, 2]]
    assert all(batch["attention_mask"].eq(1).all() for batch in batches)
    assert batches[0]["attention_mask"].dtype == torch.int64


def test_only_the_start_alone_is_added_where_the_tokenizer_adds_only_that(tmp_path):
    tokenizer = bpe("gpt2")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    file = tmp_path / "text.txt"
    file.write_text("alpha beta " * 30)
    (batch,) = text(file, length=7, samples=3, batch_size=3).batches(tokenizer)
    bare = tokenizer(file.read_text(), add_special_tokens=False)["input_ids"]
    assert batch["input_ids"].tolist() == [[0, *bare[6 * i : 6 * i + 6]] for i in range(3)]


def test_a_short_text_gives_the_windows_it_has(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("a b " * 13)
    inputs = text(file, length=5, samples=100, batch_size=4)
    assert sum(len(batch["input_ids"]) for batch in inputs.batches(TOKENIZERS["words"])) == 5


def test_few_samples_read_little_of_a_large_file(tmp_path, monkeypatch):
    file = tmp_path / "text.txt"
    file.write_text("word a b " * 200_000)
    read = []
    original = module._ids

    def counted(tokenizer, piece, **options):
        read.append(len(piece))
        return original(tokenizer, piece, **options)

    monkeypatch.setattr(module, "_ids", counted)
    list(text(file, length=16, samples=2).batches(words()))
    assert sum(read) < 2 * module.PIECE_CHARACTERS < file.stat().st_size / 10


def test_text_without_white_space_is_cut_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PIECE_CHARACTERS", 10)
    file = tmp_path / "text.txt"
    file.write_text("字" * 45, encoding="utf-8")
    batches = text(file, length=9, samples=100).batches(TOKENIZERS["gpt2"])
    assert sum(1 for _ in batches) == 45 * 3 // 9


def test_a_cut_loses_no_line_break(tmp_path, monkeypatch):
    """Only a space may be dropped at a cut, for tokenizers that add their own."""
    monkeypatch.setattr(module, "PIECE_CHARACTERS", 64)
    file = tmp_path / "text.txt"
    file.write_text("alpha\n" * 40)
    tokenizer = TOKENIZERS["llama2"]
    batches = text(file, length=2, samples=1000).batches(tokenizer)
    tokens = tokenizer.convert_ids_to_tokens(torch.cat([b["input_ids"] for b in batches]).flatten())
    assert "".join(tokens).count("\n") >= 39  # the last may stand in an unfinished window


def test_a_byte_order_mark_is_no_token(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(b"\xef\xbb\xbfword a b")
    (batch,) = text(file, length=3, samples=1).batches(TOKENIZERS["words"])
    assert batch["input_ids"].tolist() == [[3, 4, 5]]


def test_unusable_files_are_named(tmp_path):
    with pytest.raises(InputError, match=r"no\.txt' does not exist"):
        text(tmp_path / "no.txt")
    with pytest.raises(InputError, match="is a folder"):
        text(tmp_path)
    binary = tmp_path / "a.png"
    binary.write_bytes(b"\x89PNG\0\0")
    with pytest.raises(InputError, match="binary"):
        text(binary)


@pytest.mark.skipif(sys.platform == "win32", reason="no file modes")
def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    file = tmp_path / "text.txt"
    file.write_text("word")

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(InputError, match=r"text\.txt' cannot be read"):
        text(file)


@pytest.mark.parametrize("late", [b"\xff\xfe\xfd", b"\0"], ids=["latin", "binary"])
def test_a_file_that_turns_out_not_to_be_text_is_named(tmp_path, late):
    file = tmp_path / "text.txt"
    file.write_bytes(b"word a b " * 1000 + late)
    with pytest.raises(InputError, match=r"text\.txt' is (not UTF-8|a binary file)"):
        list(text(file, length=4, samples=10_000).batches(words()))


@pytest.mark.parametrize(
    ("options", "name"),
    [({"length": 1}, "length=1"), ({"samples": 0}, "samples=0"), ({"batch_size": 0}, "batch_size")],
)
def test_options_out_of_range_are_named(tmp_path, options, name):
    with pytest.raises(InputError, match=name):
        text(Path(tmp_path) / "any.txt", **options)


def test_a_length_without_room_is_an_error(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("word a b")
    with pytest.raises(InputError, match=r"length=2 leaves no room .* 2 special tokens"):
        next(text(file, length=2).batches(words()))


@pytest.mark.parametrize(("content", "count"), [("word a b", 3), ("", 0)])
def test_a_text_shorter_than_one_sample_says_how_long_it_is(tmp_path, content, count):
    file = tmp_path / "text.txt"
    file.write_text(content)
    with pytest.raises(InputError, match=f"has {count} tokens, and one sample needs 6; "):
        next(text(file, length=8).batches(words()))
