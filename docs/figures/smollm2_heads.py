"""README's map of SmolLM2's heads, layers from left to right.

sinkwise diagnose pypi:smollm2-135m --text tests/texts/pride.txt --length 133 --samples 8
python docs/figures/smollm2_heads.py scan
"""

import sys
from pathlib import Path
from typing import Any

import altair as alt

import sinkwise as sw
from sinkwise.reports.charts import png
from sinkwise.reports.heads_figure import heads_figure

OUT = Path(__file__).parent.parent / "smollm2-heads.png"
CELL = 22


def figure(scan: sw.Scan) -> Any:
    """The figure that `sinkwise diagnose` saves, on its side: a page is wider than it is high."""
    heads, layers = scan.heads["head"].n_unique(), scan.heads["layer"].n_unique()
    title = alt.Title(
        f"Attention sinks of {scan.meta['model']}",
        subtitle="one cell per head; deep colour: a sink on every sample",
    )
    return (
        heads_figure(scan)
        .encode(
            x=alt.X("layer:O", title="layer", sort=None, axis=alt.Axis(labelAngle=0)),
            y=alt.Y("head:O", title="head"),
        )
        .properties(width=CELL * layers, height=CELL * heads, title=title)
    )


if __name__ == "__main__":
    OUT.write_bytes(png(figure(sw.Scan.load(Path(sys.argv[1])))))
