"""The chart of an attention map: one row per query, one column per key."""

from typing import Any

from jaxtyping import Float
from torch import Tensor


def map_figure(attention: Float[Tensor, "query key"], title: str) -> Any:
    """An Altair chart of an attention map; a sink is a dark column."""
    import altair as alt

    rows = [
        {"query": query, "key": key, "attention": round(weight, 4)}
        for query, line in enumerate(attention.tolist())
        for key, weight in enumerate(line)
    ]
    side = max(5, min(14, 240 // max(attention.shape)))
    axis = alt.Axis(ticks=False, domain=False, labels=False)
    return (
        alt.Chart(alt.Data(values=rows), title=title)
        .mark_rect()
        .encode(
            x=alt.X("key:O", title="key", axis=axis),
            y=alt.Y("query:O", title="query", axis=axis, sort=None),
            color=alt.Color(
                "attention:Q",
                title="attention",
                scale=alt.Scale(domain=[0, 1], range=["#f4f6fa", "#3b6fb6", "#12263f"]),
                legend=alt.Legend(gradientLength=100),
            ),
        )
        .properties(width=side * attention.shape[1], height=side * attention.shape[0])
        .configure_view(stroke=None)
    )
