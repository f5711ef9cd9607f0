"""Finished runs on disk, so that an interrupted comparison resumes."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from sinkwise.errors import InputError
from sinkwise.hosts.loading.source import source_of
from sinkwise.storage.files import write_bytes
from sinkwise.streaming.comparison.compare import Method, MethodRun


def text_tokens(model: nn.Module, path: Path, count: int) -> list[int]:
    """The first `count` tokens of a UTF-8 file, after the tokenizer's own prefix.

    Raises InputError for a model without a tokenizer, and for a text that is shorter.
    """
    from sinkwise.data.text import text

    source = source_of(model)
    if source is None or source.tokenizer is None:
        raise InputError(f"text needs a tokenizer, and {type(model).__name__} has none")
    windows = text(path, length=count, samples=1).batches(source.tokenizer)
    return next(windows)["input_ids"][0].tolist()


def facts(name: str, tokens: list[int], every: int) -> dict[str, Any]:
    """Everything except the method that determines a run."""
    checksum = hashlib.blake2b(repr(tokens).encode(), digest_size=8).hexdigest()
    return {"model": name, "tokens": len(tokens), "checksum": checksum, "recompute_every": every}


def save(one: MethodRun, of: dict[str, Any], folder: Path) -> None:
    """Write a run to the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_bytes(_file(one.method, folder), json.dumps({"facts": of, **asdict(one)}).encode())


def load(method: Method, of: dict[str, Any], folder: Path) -> MethodRun | None:
    """The run of that method in the folder; None if there is none with these facts, or this
    version cannot read it.
    """
    try:
        kept = json.loads(_file(method, folder).read_text())
        if kept.pop("facts") != of or Method(**kept.pop("method")) != method:
            return None
        return MethodRun(method, **kept)
    except (FileNotFoundError, json.JSONDecodeError, KeyError, TypeError):
        return None


def _file(method: Method, folder: Path) -> Path:
    return folder / f"{method.name.replace(' ', '')}.json"
