"""The figure of a comparison over a text: perplexity by position, one line a method."""

import math
from collections.abc import Sequence
from typing import Any

from sinkwise.streaming.comparing import Course, curve


def stream_figure(courses: Sequence[Course], title: str, width: int) -> Any:
    """An Altair chart; each point is the perplexity of `width` consecutive tokens."""
    import altair as alt

    rows = [
        {"cache": one.method.name, "position": position, "perplexity": value}
        for one in courses
        for position, value in curve(one, width)
        if math.isfinite(value)
    ]
    return (
        alt.Chart(
            alt.Data(values=rows),
            title=alt.Title(title, subtitle=f"of {width} consecutive tokens; lower is better"),
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
