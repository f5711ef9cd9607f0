"""The chart of a scan: layers × heads, coloured by verdict."""

from typing import Any

import polars as pl

from sinkwise.scanning.result import Scan

COLORS = {
    "nop": "#3b6fb6",
    "broadcast": "#d1495b",
    "mixed": "#8d5fa8",
    "unclassified": "#9aa0a6",
    "none": "#f1f3f4",
}
"""Colour of each verdict, distinguishable with red-green colour blindness."""


def heads_figure(scan: Scan) -> Any:
    """An Altair chart with one cell per head: hue shows the verdict, opacity the share of samples
    with a sink.
    """
    import altair as alt

    rows = _rows(scan)
    domain = list(COLORS)
    heads, layers = len({row["head"] for row in rows}), len({row["layer"] for row in rows})
    cell = max(8, min(26, 900 // max(layers, heads)))
    return (
        alt.Chart(
            alt.Data(values=rows),
            title=alt.Title(
                f"Attention sinks of {scan.meta['model']}",
                subtitle=f"{scan.meta['samples']} samples; full opacity: a sink in every sample",
            ),
        )
        .mark_rect(stroke="white", strokeWidth=1)
        .encode(
            x=alt.X("head:O", title="head", axis=alt.Axis(labelAngle=0)),
            y=alt.Y("layer:O", title="layer", sort=None),
            color=alt.Color(
                "verdict:N",
                title="verdict",
                scale=alt.Scale(domain=domain, range=[COLORS[name] for name in domain]),
            ),
            opacity=alt.condition(
                "datum.verdict == 'none'",
                alt.value(1.0),
                alt.Opacity(
                    "sink_share:Q",
                    scale=alt.Scale(domain=[0, 1], range=[0.25, 1]),
                    legend=None,
                ),
            ),
        )
        .properties(width=cell * heads, height=cell * layers)
        .configure_view(stroke=None)
    )


def _rows(scan: Scan) -> list[dict[str, Any]]:
    """One row per head; several attention modules of one layer are distinguished by name."""
    names = dict(scan.heads.group_by("layer").agg(pl.col("name").n_unique()).iter_rows())
    return [
        {
            "layer": str(layer) if names[layer] == 1 else f"{layer} {name.rpartition('.')[2]}",
            "head": head,
            "verdict": verdict,
            "sink_share": share or 0.0,
        }
        for layer, name, head, verdict, share in scan.heads.select(
            "layer", "name", "head", "verdict", "sink_share"
        ).iter_rows()
    ]
