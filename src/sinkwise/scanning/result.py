"""The result of a scan, and how it is kept on disk."""

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


@dataclass(frozen=True, eq=False)
class Scan:
    """Result of a scan: three frames, and everything needed to read them again."""

    events: pl.DataFrame
    """One row a sample, layer, head and sink."""
    heads: pl.DataFrame
    """One row a layer and head."""
    layers: pl.DataFrame
    """One row a layer."""
    meta: dict[str, Any]
    """Model, rules, versions, counts."""

    def verdict(self) -> Verdict:
        """Which mechanisms dominate where, and what to do about it."""
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

        An existing scan there is replaced and what else lies beside it is kept; any other
        non-empty directory is refused. Raises InputError when the place cannot be written (a full
        disk, say); an earlier scan is then still there.
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
            text = json.dumps(self.meta, indent=2, ensure_ascii=False) + "\n"
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
        """Read what `save` wrote. Raises InputError where `directory` holds no scan."""
        source = Path(directory)
        try:
            meta = json.loads((source / "scan.json").read_text(encoding="utf-8"))
            frames = {name: pl.read_parquet(source / f"{name}.parquet") for name in FRAMES}
        except (OSError, ValueError, pl.exceptions.PolarsError) as error:
            raise InputError(f"{str(source)!r} is no saved scan: {error}") from error
        return cls(**frames, meta=meta)


def check_target(directory: str | Path) -> Path:
    """The directory as a path, if a scan can be saved there: new, empty, or an earlier scan.

    Raises InputError otherwise.
    """
    target = Path(directory)
    if target.exists():
        free = target.is_dir() and ((target / "scan.json").exists() or not any(target.iterdir()))
        if not free:
            raise InputError(f"out={str(target)!r} exists and is no scan; name a new directory")
    return target
