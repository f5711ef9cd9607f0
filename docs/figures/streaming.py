"""The chart of docs/streaming.md: quality, time and memory of every cache.

python docs/figures/streaming.py
"""

from typing import Any

import altair as alt
from page_tables import DOCS, measured, table, write

PAGE, OUT = DOCS / "streaming.md", DOCS / "streaming.png"
FIELDS = {"perplexity": "perplexity", "ms/token": "ms per token", "MiB": "MiB of cache"}
COLORS = {"dense": "#9aa0a6", "plain": "#d1495b", "recomputation": "#e0a030"}
SINKS = "#3b6fb6"


def rows() -> list[dict[str, Any]]:
    """One row per cache."""
    found = []
    for line in table(PAGE, "| cache | perplexity |"):
        values = {name: measured(line[name]) for name in FIELDS}
        numbers = {name: None if value is None else value.mean for name, value in values.items()}
        found.append({"cache": line["cache"], **numbers})
    return found


def figure(found: list[dict[str, Any]]) -> Any:
    """A panel per quantity, logarithmic where it spans decades."""
    names = [row["cache"] for row in found]
    panels = []
    for index, (field, title) in enumerate(FIELDS.items()):
        data = [
            {
                "cache": row["cache"],
                "value": row[field],
                "color": COLORS.get(row["cache"].partition(" ")[0], SINKS),
            }
            for row in found
            if row[field] is not None
        ]
        axis = alt.Axis(labelLimit=160) if index == 0 else alt.Axis(labels=False, ticks=False)
        base = alt.Chart(alt.Data(values=data)).encode(
            x=alt.X("value:Q", title=title, axis=alt.Axis(labels=False, ticks=False)),
            y=alt.Y("cache:N", title=None, sort=names, axis=axis, scale=alt.Scale(domain=names)),
        )
        bars = base.mark_bar().encode(color=alt.Color("color:N", scale=None))
        text = base.mark_text(align="left", dx=3).encode(text=alt.Text("value:Q", format=".1f"))
        panels.append((bars + text).properties(width=190, height=190))
    return alt.hconcat(*panels).configure_view(stroke=None).configure_axis(grid=False)


if __name__ == "__main__":
    write(figure(rows()), rows(), OUT)
