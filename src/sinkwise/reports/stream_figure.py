"""The figure of a comparison over a text: perplexity by position, one line a method."""

import math
from collections.abc import Sequence
from typing import Any

from sinkwise.streaming.comparison.compare import Course, curve

LEAST_SCORED = 32
"""Scored tokens of a point at least: fewer are noise, where recomputation scores few."""


def stream_figure(courses: Sequence[Course], title: str, width: int) -> Any:
    """An Altair chart; each point is the perplexity of `width` consecutive tokens, or of as many
    times that as hold `LEAST_SCORED` scored ones.
    """
    import altair as alt

    rows = [
        {"cache": one.method.name, "position": position, "perplexity": value}
        for one in courses
        for position, value in curve(one, _stretch(one, width))
        if math.isfinite(value)
    ]
    return (
        alt.Chart(
            alt.Data(values=rows),
            title=alt.Title(
                title,
                subtitle=f"of {width} consecutive tokens{_wider(courses, width)}; lower is better",
            ),
        )
        .mark_line(strokeWidth=2)
        .encode(
            x=alt.X("position:Q", title="position in the text"),
            y=alt.Y("perplexity:Q", title="perplexity", scale=alt.Scale(type="log", nice=True)),
            color=alt.Color(
                "cache:N",
                title="sinks + window",
                sort=[one.method.name for one in courses],
                scale=alt.Scale(scheme="tableau10"),
            ),
        )
        .properties(width=640, height=320)
    )


def _stretch(one: Course, width: int) -> int:
    apart = (one.positions[-1] - one.positions[0]) / max(len(one.positions) - 1, 1)
    return width * math.ceil(LEAST_SCORED * apart / width)


def _wider(courses: Sequence[Course], width: int) -> str:
    exact = [one for one in courses if one.method.kind == "recompute"]
    stretches = [stretch for one in exact if (stretch := _stretch(one, width)) > width]
    return f" (recompute: {stretches[0]:,})" if stretches else ""
