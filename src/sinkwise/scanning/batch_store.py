"""Finished batches on disk, so that interrupted scans resume and processes share one scan."""

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
from sinkwise.measure.sums import EVENT_INDEX, CallSums, ResidualSums, SampleSums
from sinkwise.scanning.basis import Basis
from sinkwise.scanning.observed import Observed
from sinkwise.storage.checksums import checksum
from sinkwise.storage.files import write_bytes

_FOLDER = re.compile(r"[0-9a-f]{32}")
_FACTS = "scan.json"


class BatchStore:
    """The finished batches of one scan, in a folder named by the checksum of the scan's facts."""

    def __init__(self, directory: str | Path, facts: dict[str, Any]) -> None:
        self.directory = Path(directory)
        self._facts = json.dumps(facts, sort_keys=True)
        self._folder = self.directory / checksum(self._facts)

    def count(self, rank: int, world: int) -> int:
        """Finished batches of a share."""
        names = [path.stem for path in self._folder.glob("[0-9]*.json")]
        return sum(int(name) % world == rank for name in names)

    def read(self, index: int, key: str | None) -> tuple[Observed, Basis] | None:
        """A finished batch, or None if it is missing, damaged, or has another key."""
        try:
            text = self._file(index, "json").read_text(encoding="utf-8")
            first_line, _, text = text.partition("\n")
            if first_line != checksum(text):
                return None
            sums = json.loads(text)
            events = self._file(index, "arrow").read_bytes()
            if sums["key"] != key or sums["events"] != checksum(events):
                return None
        except (OSError, ValueError):
            return None
        basis = Basis(**{name: tuple(value) for name, value in sums["basis"].items()})
        return _unpacked(sums, events), basis

    def write(self, index: int, key: str | None, observed: Observed, basis: Basis) -> None:
        """Store a finished batch: first its events, then its sums, which mark it as complete.

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
        sums, events = _packed(observed)
        text = json.dumps({**sums, "key": key, "events": checksum(events), "basis": asdict(basis)})
        write_bytes(self._file(index, "arrow"), events)
        write_bytes(self._file(index, "json"), f"{checksum(text)}\n{text}".encode())

    def remove_others(self) -> list[str]:
        """Remove the batches of other scans; returns the names of the facts that differ."""
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
    """Remove all finished batches in a directory, and the directory if nothing else is in it."""
    path = Path(directory)
    for folder in _folders(path):
        shutil.rmtree(folder, ignore_errors=True)
    if path.is_dir() and not any(path.iterdir()):
        path.rmdir()


def _folders(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return [path for path in sorted(directory.iterdir()) if _FOLDER.fullmatch(path.name)]


def _packed(observed: Observed) -> tuple[dict[str, Any], bytes]:
    """The sums as JSON, whose floats are exact, and the events as an Arrow table."""
    sums = observed.sums
    index, values = sums.events
    columns = dict(zip([*EVENT_INDEX, *EVENT_FIELDS], [*index, *values], strict=True))
    events = io.BytesIO()
    pl.DataFrame(columns).write_ipc(events)
    text = {
        "samples": sums.samples,
        "call_sums": [
            [layer, name, {**vars(call), "kind_sum": call.kind_sum.tolist(),
                           "kinds": sorted(call.kinds)}]
            for (layer, name), call in sums.calls.items()
        ],
        "residual_sums": [[layer, vars(residual)] for layer, residual in sums.residuals.items()],
        "unreadable": sums.unreadable.tolist(),
        "attending": list(observed.attending),
        "skipped": sorted(observed.skipped),
        "silent": list(observed.silent),
        "unfaithful": sorted(observed.unfaithful),
        "key_lengths": sorted(observed.key_lengths),
        "layout_length": observed.layout_length,
        "layout_fits": observed.layout_fits,
        "calls": observed.calls,
    }  # fmt: skip
    return text, events.getvalue()


def _unpacked(text: dict[str, Any], events: bytes) -> Observed:
    calls = {
        (layer, name): CallSums(
            **{**sums, "kind_sum": np.array(sums["kind_sum"]), "kinds": set(sums["kinds"])}
        )
        for layer, name, sums in text["call_sums"]
    }
    residuals = {
        layer: ResidualSums(
            **{
                **sums,
                "sums": defaultdict(float, sums["sums"]),
                "counts": defaultdict(int, sums["counts"]),
            }
        )
        for layer, sums in text["residual_sums"]
    }
    frame = pl.read_ipc(io.BytesIO(events))
    index = np.stack([frame[name].to_numpy() for name in EVENT_INDEX])
    values = np.stack([frame[name].to_numpy() for name in EVENT_FIELDS])
    unreadable = np.array(text["unreadable"], dtype=np.int64).reshape(3, -1)
    return Observed(
        SampleSums.restored(text["samples"], calls, residuals, (index, values), unreadable),
        attending=dict.fromkeys(text["attending"]),
        skipped=set(text["skipped"]),
        silent=dict.fromkeys(text["silent"]),
        unfaithful=set(text["unfaithful"]),
        key_lengths=set(text["key_lengths"]),
        layout_length=text["layout_length"],
        layout_fits=text["layout_fits"],
        calls=text["calls"],
    )
