"""The figure of a scan: layers x heads, coloured by verdict."""

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
"""Colour of each verdict, told apart also without red and green."""


def heads_figure(scan: Scan) -> Any:
    """An Altair chart: one cell a head, its colour the verdict, its depth the share of inputs."""
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
                subtitle=f"{scan.meta['samples']} samples; deep colour: sinks on all of them",
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
    """One row a head; layers with several attention modules are told apart by their names."""
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
