"""What the figures share: numbers read from a page's own table, and images that carry their data.

A chart that is drawn from the table below it cannot disagree with it, as long as it is drawn again
when the table changes. The rows behind a chart are therefore stored in its PNG, and a test compares
them with the page.
"""

import json
import re
import struct
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from sinkwise.reports.charts import png

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

COLORS = {
    "nop": "#3b6fb6",
    "broadcast": "#d1495b",
    "mixed": "#8d5fa8",
    "unclassified": "#9aa0a6",
}
"""Verdicts, as in the figures of a scan."""

_END = b"\x00\x00\x00\x00IEND\xaeB`\x82"
_NUMBER = r"[-+−]?\d[\d,]*\.?\d*(?:e[-+]\d+)?"


class Measured(NamedTuple):
    """A number with its range over seeds, where it has one."""

    mean: float
    low: float
    high: float


def measured(cell: str) -> Measured | None:
    """`0.10 (0.09 to 0.12)`, `1,158.22` or `1.08 x`; None for `-` and an empty cell."""
    found = re.match(rf"({_NUMBER})(?: \(({_NUMBER}) to ({_NUMBER})\))?", cell)
    if found is None:
        return None
    mean, low, high = (
        None if text is None else float(text.replace(",", "").replace("−", "-"))
        for text in found.groups()
    )
    assert mean is not None
    return Measured(mean, mean if low is None else low, mean if high is None else high)


def table(page: Path, heading: str) -> list[dict[str, str]]:
    """The rows of the page's first table whose header line starts with `heading`.

    Columns of the same name get a number: `others`, `others #2`. Raises ValueError where
    there is no such table.
    """
    lines = iter(page.read_text(encoding="utf-8").splitlines())
    for line in lines:
        if line.startswith(heading):
            names: list[str] = []
            for name in _cells(line):
                again = sum(known.partition(" #")[0] == name for known in names)
                names.append(f"{name} #{again + 1}" if again else name)
            next(lines)
            rows = []
            for row in lines:
                if not row.startswith("|"):
                    break
                rows.append(dict(zip(names, _cells(row), strict=True)))
            return rows
    raise ValueError(f"{page.name} has no table {heading!r}")


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def write(chart: Any, rows: list[dict[str, Any]], out: Path) -> None:
    """Save a chart with the rows behind it."""
    text = b"sinkwise\x00" + json.dumps(rows).encode("latin-1")
    checksum = struct.pack(">I", zlib.crc32(b"tEXt" + text))
    image = png(chart).removesuffix(_END)
    out.write_bytes(image + struct.pack(">I", len(text)) + b"tEXt" + text + checksum + _END)


def stored(image: Path) -> list[dict[str, Any]]:
    """The rows that `write` put into an image."""
    data = image.read_bytes()
    start = data.index(b"tEXtsinkwise\x00")
    (length,) = struct.unpack(">I", data[start - 4 : start])
    return json.loads(data[start + 4 : start + 4 + length].partition(b"\x00")[2])
