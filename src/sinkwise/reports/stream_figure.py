"""The figure of a comparison on a text: perplexity by position, one line per method."""

import math
from collections.abc import Sequence
from typing import Any

from sinkwise.streaming.comparison.compare import curve
from sinkwise.streaming.comparison.scoring import MethodRun

LEAST_SCORED = 32
"""Least number of scored tokens per point; recomputation scores few, and fewer are noise."""


def stream_figure(runs: Sequence[MethodRun], title: str, width: int) -> Any:
    """An Altair chart; each point is the perplexity of `width` consecutive tokens, or of a
    multiple of `width` that holds `LEAST_SCORED` scored ones.
    """
    import altair as alt

    rows = [
        {"cache": one.method.name, "position": position, "perplexity": value}
        for one in runs
        for position, value in curve(one, _stretch(one, width))
        if math.isfinite(value)
    ]
    return (
        alt.Chart(
            alt.Data(values=rows),
            title=alt.Title(
                title,
                subtitle=f"of {width} consecutive tokens{_wider(runs, width)}; lower is better",
            ),
        )
        .mark_line(strokeWidth=2)
        .encode(
            x=alt.X("position:Q", title="position in the text"),
            y=alt.Y("perplexity:Q", title="perplexity", scale=alt.Scale(type="log", nice=True)),
            color=alt.Color(
                "cache:N",
                title="sinks + window",
                sort=[one.method.name for one in runs],
                scale=alt.Scale(scheme="tableau10"),
            ),
        )
        .properties(width=640, height=320)
    )


def _stretch(one: MethodRun, width: int) -> int:
    apart = (one.positions[-1] - one.positions[0]) / max(len(one.positions) - 1, 1)
    return width * math.ceil(LEAST_SCORED * apart / width)


def _wider(runs: Sequence[MethodRun], width: int) -> str:
    exact = [one for one in runs if one.method.kind == "recompute"]
    stretches = [stretch for one in exact if (stretch := _stretch(one, width)) > width]
    return f" (recompute: {stretches[0]:,})" if stretches else ""
