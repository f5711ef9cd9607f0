"""Text files as windows of tokens."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from sinkwise.data.batch import LazyBatch
from sinkwise.errors import InputError
from sinkwise.storage.checksums import checksum

PIECE_CHARACTERS = 1 << 16
"""Characters tokenized at once, so that a few samples of a huge file do not need all of it."""

# No pre-tokenizer joins two words across a space. Elsewhere some do: Llama 3's puts newlines into
# the same token as the full stop before them.
_BETWEEN_WORDS = re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])")
_BEFORE_SPACE = re.compile(r"(?<=\S)(?=\s)")


@dataclass(frozen=True)
class TextInputs:
    """Consecutive windows of one text, without overlap; the file is read when batches are made."""

    path: Path
    """A UTF-8 text file."""
    length: int
    """Tokens per window, the tokenizer's special tokens included."""
    samples: int
    """Number of windows, at most; a short text gives fewer."""
    batch_size: int
    """Windows per batch; the last batch may be smaller."""

    def batches(self, tokenizer: Any) -> Iterator[dict[str, Int[Tensor, "batch key"]]]:
        """Batches of `input_ids` and an `attention_mask` of ones, both int64.

        Each window is enclosed in the special tokens that `tokenizer` itself adds to a text.

        Raises InputError for a file that is not UTF-8 text, for a text shorter than one window,
        and for a `length` that leaves no room beside the special tokens.
        """
        for batch in self.lazy_batches(tokenizer):
            yield batch.load()

    def lazy_batches(self, tokenizer: Any) -> Iterator[LazyBatch]:
        """The same batches; the text is tokenized at once, tensors are made on loading."""
        prefix, suffix = _special_tokens(tokenizer)
        room = self.length - len(prefix) - len(suffix)
        if room < 1:
            raise InputError(
                f"length={self.length} leaves no room for text beside the tokenizer's "
                f"{len(prefix) + len(suffix)} special tokens; give a greater length"
            )
        windows = islice(_windows(self.path, tokenizer, room), self.samples)

        def load(rows: list[list[int]]) -> dict[str, Int[Tensor, "batch key"]]:
            ids = torch.tensor([[*prefix, *row, *suffix] for row in rows], dtype=torch.int64)
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

        for rows in _batched(windows, self.batch_size):
            yield LazyBatch(
                load=partial(load, rows),
                first=partial(load, rows[:1]),
                key=partial(checksum, repr((prefix, suffix, rows))),
            )

    def facts(self) -> dict[str, Any]:
        """What determines the tokens that the model gets, apart from its tokenizer."""
        try:
            state = self.path.stat()
        except OSError as error:
            raise InputError(f"text {str(self.path)!r} cannot be read: {error}") from error
        return {
            "text": self.path.name,
            "bytes": state.st_size,
            "changed": state.st_mtime_ns,
            "length": self.length,
            "samples": self.samples,
            "batch_size": self.batch_size,
        }


def text(
    path: str | Path, *, length: int = 1024, samples: int = 8, batch_size: int = 1
) -> TextInputs:
    """Up to `samples` windows of `length` tokens from the start of a UTF-8 text file.

    Raises InputError for a path that is no readable text file, for a length below 2, and for a
    number of samples or a batch size below 1.
    """
    if length < 2:
        raise InputError(f"length={length} must be at least 2 tokens")
    for name, value in (("samples", samples), ("batch_size", batch_size)):
        if value < 1:
            raise InputError(f"{name}={value} must be at least 1")
    file = Path(path)
    if file.is_dir():
        raise InputError(f"text {str(path)!r} is a folder; give a text file")
    try:
        with open(file, "rb") as opened:
            head = opened.read(4096)
    except FileNotFoundError as error:
        raise InputError(f"text {str(path)!r} does not exist") from error
    except (OSError, ValueError) as error:
        raise InputError(f"text {str(path)!r} cannot be read: {error}") from error
    if b"\0" in head:
        raise InputError(f"text {str(path)!r} is a binary file; give UTF-8 text")
    return TextInputs(file, length, samples, batch_size)


def _batched(windows: Iterator[list[int]], size: int) -> Iterator[list[list[int]]]:
    while batch := list(islice(windows, size)):
        yield batch


def _windows(path: Path, tokenizer: Any, room: int) -> Iterator[list[int]]:
    waiting: list[int] = []
    found = False
    for piece in _pieces(path, drop_space=_drops_space(tokenizer)):
        waiting += _ids(tokenizer, piece)
        whole = len(waiting) // room
        for index in range(whole):
            found = True
            yield waiting[index * room : (index + 1) * room]
        del waiting[: whole * room]
    if not found:
        raise InputError(
            f"text {str(path)!r} has {len(waiting)} tokens, and one sample needs {room}; give a "
            "longer text or a smaller length"
        )


def _pieces(path: Path, *, drop_space: bool) -> Iterator[str]:
    """The text in pieces of about `PIECE_CHARACTERS` that end between two words."""
    rest = ""
    try:
        with open(path, encoding="utf-8-sig") as file:
            while read := file.read(PIECE_CHARACTERS):
                if "\0" in read:
                    raise InputError(f"text {str(path)!r} is a binary file; give UTF-8 text")
                rest += read
                if len(read) < PIECE_CHARACTERS:  # the file ends here
                    break
                end = _cut(rest)
                yield rest[:end]
                rest = rest[end + 1 :] if drop_space and rest[end : end + 1] == " " else rest[end:]
    except UnicodeDecodeError as error:
        raise InputError(f"text {str(path)!r} is not UTF-8: {error.reason}") from error
    except OSError as error:
        raise InputError(f"text {str(path)!r} cannot be read: {error}") from error
    if rest:
        yield rest


def _cut(piece: str) -> int:
    """Where to end `piece`: between its last two words, else before its last white space.

    Text without any white space ends where it is, possibly inside a word.
    """
    for pattern in (_BETWEEN_WORDS, _BEFORE_SPACE):
        # In nearly every text it lies near the end: search there first.
        for start in (max(0, len(piece) - 1024), 0):
            cuts = [match.start() for match in pattern.finditer(piece, start)]
            if cuts:
                return cuts[-1]
    return len(piece)


def _ids(tokenizer: Any, piece: str, *, special: bool = False) -> list[int]:
    return tokenizer(piece, add_special_tokens=special, verbose=False)["input_ids"]


def _drops_space(tokenizer: Any) -> bool:
    """True for tokenizers that prepend a space to any text (SentencePiece)."""
    whole = _ids(tokenizer, "word word")
    word = _ids(tokenizer, "word")
    return whole != word + _ids(tokenizer, " word") and whole == word + word


def _special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer adds before and after a text."""
    bare, full = _ids(tokenizer, "word"), _ids(tokenizer, "word", special=True)
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    raise InputError("the tokenizer changes a text when it adds special tokens: it cannot be used")
