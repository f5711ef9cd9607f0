"""Finished runs on disk, so that an interrupted comparison resumes."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from sinkwise.hosts.weights import weights_checksum
from sinkwise.storage.checksums import checksum
from sinkwise.storage.files import write_bytes
from sinkwise.storage.own_code import own_code
from sinkwise.storage.versions import versions
from sinkwise.streaming.comparison.methods import Method
from sinkwise.streaming.comparison.scoring import MethodRun


def facts(model: nn.Module, name: str, tokens: list[int], every: int) -> dict[str, Any]:
    """Everything except the method that determines a run: weights, text, versions, own code."""
    return {
        "model": name,
        "weights": weights_checksum(model),
        "tokens": len(tokens),
        "checksum": checksum(repr(tokens)),
        "recompute_every": every,
        "versions": versions(),
        "sinkwise": own_code("attention", "core", "streaming", "interception", "mitigations", "nn"),
    }


def save_run(one: MethodRun, of: dict[str, Any], folder: Path) -> None:
    """Write a run to the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_bytes(_file(one.method, folder), json.dumps({"facts": of, **asdict(one)}).encode())


def load_run(method: Method, of: dict[str, Any], folder: Path) -> MethodRun | None:
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
