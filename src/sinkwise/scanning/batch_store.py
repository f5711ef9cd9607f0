"""Finished batches on disk, so that a scan that was stopped goes on, and processes share one."""

import hashlib
import io
import json
import re
import shutil
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from sinkwise.errors import InputError
from sinkwise.measure.call import EVENT_FIELDS
from sinkwise.measure.sums import PLACE_ROWS, CallSums, Part, StreamSums
from sinkwise.scanning.observer import Basis, Observed
from sinkwise.storage.files import write_bytes

_PLACE = [f"place_{row}" for row in range(PLACE_ROWS)]
_FOLDER = re.compile(r"[0-9a-f]{32}")
_FACTS = "scan.json"


class Parts:
    """The finished batches of one scan, in a folder named by the checksum of what it is."""

    def __init__(self, directory: str | Path, facts: dict[str, Any]) -> None:
        self.directory = Path(directory)
        self._facts = json.dumps(facts, sort_keys=True)
        self._folder = self.directory / _checksum(self._facts.encode())

    def count(self, rank: int, world: int) -> int:
        """How many batches of a share are there; only its own process adds to them."""
        names = [path.stem for path in self._folder.glob("[0-9]*.json")]
        return sum(int(name) % world == rank for name in names)

    def read(self, index: int, key: str | None) -> tuple[Observed, Basis] | None:
        """A finished batch, or None where it is not there whole or `key` says it is another."""
        try:
            checksum, _, text = (
                self._file(index, "json").read_text(encoding="utf-8").partition("\n")
            )
            if checksum != _checksum(text.encode()):
                return None
            told = json.loads(text)
            rows = self._file(index, "arrow").read_bytes()
            if told["key"] != key or told["rows"] != _checksum(rows):
                return None
        except (OSError, ValueError):
            return None
        basis = Basis(**{name: tuple(value) for name, value in told["basis"].items()})
        return _unpacked(told, rows), basis

    def write(self, index: int, key: str | None, observed: Observed, basis: Basis) -> None:
        """Keep a finished batch: its rows first; the sums, written last, say that all is there.

        Raises InputError where that fails.
        """
        if not (self._folder / _FACTS).exists():
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(
                    f"parts={str(self.directory)!r} could not be written: {error.strerror}"
                ) from error
            write_bytes(self._folder / _FACTS, self._facts.encode())
        told, rows = _packed(observed)
        text = json.dumps({**told, "key": key, "rows": _checksum(rows), "basis": asdict(basis)})
        write_bytes(self._file(index, "arrow"), rows)
        write_bytes(self._file(index, "json"), f"{_checksum(text.encode())}\n{text}".encode())

    def drop_others(self) -> list[str]:
        """Remove what other scans left in the directory; which facts of theirs were others."""
        changed: set[str] = set()
        mine = json.loads(self._facts)
        for folder in _folders(self.directory):
            if folder == self._folder:
                continue
            try:
                theirs = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
            except (OSError, ValueError):
                theirs = {}
            names = mine.keys() | theirs.keys()
            changed |= {name for name in names if mine.get(name) != theirs.get(name)}
            shutil.rmtree(folder, ignore_errors=True)
        return sorted(changed)

    def _file(self, index: int, kind: str) -> Path:
        return self._folder / f"{index:08d}.{kind}"


def remove_parts(directory: str | Path) -> None:
    """Remove the finished batches in a directory, and the directory if nothing else is in it."""
    path = Path(directory)
    for folder in _folders(path):
        shutil.rmtree(folder, ignore_errors=True)
    if path.is_dir() and not any(path.iterdir()):
        path.rmdir()


def _folders(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return [path for path in sorted(directory.iterdir()) if _FOLDER.fullmatch(path.name)]


def _checksum(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _packed(observed: Observed) -> tuple[dict[str, Any], bytes]:
    """As JSON, whose floats are exact, and as a table of events."""
    part = observed.part
    place, values = part.events
    columns = dict(zip([*_PLACE, *EVENT_FIELDS], [*place, *values], strict=True))
    rows = io.BytesIO()
    pl.DataFrame(columns).write_ipc(rows)
    told = {
        "samples": part.samples,
        "calls": [
            [layer, name, {**vars(sums), "kind_sum": sums.kind_sum.tolist(),
                           "kinds": sorted(sums.kinds)}]
            for (layer, name), sums in part.calls.items()
        ],
        "streams": [[layer, vars(sums)] for layer, sums in part.streams.items()],
        "unreadable": part.unreadable.tolist(),
        "seen": list(observed.seen),
        "skipped": sorted(observed.skipped),
        "silent": list(observed.silent),
        "doubtful": sorted(observed.doubtful),
        "lengths": sorted(observed.lengths),
        "given": observed.given,
        "fitted": observed.fitted,
        "counts": observed.calls,
    }  # fmt: skip
    return told, rows.getvalue()


def _unpacked(told: dict[str, Any], rows: bytes) -> Observed:
    calls = {
        (layer, name): CallSums(
            **{**sums, "kind_sum": np.array(sums["kind_sum"]), "kinds": set(sums["kinds"])}
        )
        for layer, name, sums in told["calls"]
    }
    streams = {
        layer: StreamSums(
            **{
                **sums,
                "sums": defaultdict(float, sums["sums"]),
                "counts": defaultdict(int, sums["counts"]),
            }
        )
        for layer, sums in told["streams"]
    }
    frame = pl.read_ipc(io.BytesIO(rows))
    place = np.stack([frame[name].to_numpy() for name in _PLACE])
    values = np.stack([frame[name].to_numpy() for name in EVENT_FIELDS])
    unreadable = np.array(told["unreadable"], dtype=np.int64).reshape(3, -1)
    return Observed(
        Part.restored(told["samples"], calls, streams, (place, values), unreadable),
        seen=dict.fromkeys(told["seen"]),
        skipped=set(told["skipped"]),
        silent=dict.fromkeys(told["silent"]),
        doubtful=set(told["doubtful"]),
        lengths=set(told["lengths"]),
        given=told["given"],
        fitted=told["fitted"],
        calls=told["counts"],
    )
