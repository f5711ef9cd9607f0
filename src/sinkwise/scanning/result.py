"""The result of a scan, and its form on disk."""

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from sinkwise.diagnosis.rules import ModelRule
from sinkwise.diagnosis.verdict import Verdict, judge
from sinkwise.errors import InputError

FRAMES = ("events", "heads", "layers")

FORMAT = 1
"""Version of the files of a saved scan; the first ones did not state it and are version 1 too."""


@dataclass(frozen=True, eq=False)
class Scan:
    """Result of a scan: three frames, and how they were made."""

    events: pl.DataFrame
    """One row per sample, layer, head and sink."""
    heads: pl.DataFrame
    """One row per layer and head."""
    layers: pl.DataFrame
    """One row per layer."""
    meta: dict[str, Any]
    """Model, rules, versions, counts."""

    def verdict(self) -> Verdict:
        """Which mechanism dominates where, and what to do about it."""
        rules = self.meta["rules"]
        used = {rules["causal"]["name"], rules["bidirectional"]["name"]}
        return judge(
            self.heads,
            self.events,
            self.layers,
            ModelRule(**rules["model"]),
            other_rule=None if used == {"mean"} else "mean",
        )

    def save(self, directory: str | Path) -> Path:
        """Write {events,heads,layers}.parquet and scan.json into `directory`, all or nothing.

        A scan that is there already is replaced, and other files beside it are kept; any other
        directory that is not empty is refused. Raises InputError if the directory cannot be
        written (on a full disk, say); an earlier scan is then still there.
        """
        target = check_target(directory)
        temporary = None
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
            new, old = temporary / "new", temporary / "old"
            new.mkdir()
            for name in FRAMES:
                getattr(self, name).write_parquet(new / f"{name}.parquet")
            about = {"format": FORMAT, **self.meta}
            text = json.dumps(about, indent=2, ensure_ascii=False) + "\n"
            (new / "scan.json").write_text(text, encoding="utf-8")
            if target.exists():
                for other in target.iterdir():
                    if not (new / other.name).exists():
                        copy = shutil.copytree if other.is_dir() else shutil.copy2
                        copy(other, new / other.name)
                os.replace(target, old)
            try:
                os.replace(new, target)
            except OSError:
                if old.exists():
                    os.rename(old, target)
                raise
            return target
        except (OSError, pl.exceptions.PolarsError) as error:
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise InputError(f"out={str(target)!r} could not be written: {reason}") from error
        finally:
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)

    @classmethod
    def load(cls, directory: str | Path) -> "Scan":
        """Load what `save` wrote, with this version of sinkwise or an earlier one.

        Raises InputError if `directory` is no saved scan, or one of a newer version.
        """
        source = Path(directory)
        try:
            meta = json.loads((source / "scan.json").read_text(encoding="utf-8"))
            version = int(meta.pop("format", FORMAT))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise InputError(f"{str(source)!r} is no saved scan: {error}") from error
        if version > FORMAT:
            raise InputError(
                f"{str(source)!r} is a scan in format {version}, and this version of sinkwise "
                f"reads formats up to {FORMAT}: update sinkwise, or scan again"
            )
        try:
            frames = {name: pl.read_parquet(source / f"{name}.parquet") for name in FRAMES}
        except (OSError, pl.exceptions.PolarsError) as error:
            raise InputError(f"{str(source)!r} is no saved scan: {error}") from error
        return cls(**frames, meta=meta)


def check_target(directory: str | Path) -> Path:
    """`directory` as a path. Raises InputError unless it is new, empty or a saved scan."""
    target = Path(directory)
    if target.exists():
        free = target.is_dir() and ((target / "scan.json").exists() or not any(target.iterdir()))
        if not free:
            raise InputError(f"out={str(target)!r} exists and is no scan; give a new directory")
    return target
