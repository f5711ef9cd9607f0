"""The chart of docs/architectures.md: how many architectures were checked, and in what way.

python docs/figures/architectures.py
"""

from collections import Counter
from typing import Any

import altair as alt
from page_tables import DOCS, table, write

PAGE, OUT = DOCS / "architectures.md", DOCS / "architectures.png"
WAYS = {"layout": "#3b6fb6", "measured": "#e0a030", "partly unknown": "#9aa0a6"}
"""How the weights of the heads are known."""


def rows() -> list[dict[str, Any]]:
    """One row per library and way to know the weights."""
    counts: Counter[tuple[str, str]] = Counter()
    for line in table(PAGE, "| name | class |"):
        way = line["sites"]
        if "none" in way:
            way = "partly unknown"
        elif "measured" in way:
            way = "measured"
        counts[line["library"].partition(" ")[0], way] += 1
    return [
        {"library": library, "weights": way, "architectures": count}
        for (library, way), count in sorted(counts.items())
    ]


def figure(found: list[dict[str, Any]]) -> Any:
    """Bars by library."""
    return (
        alt.Chart(alt.Data(values=found))
        .mark_bar()
        .encode(
            x=alt.X("architectures:Q", title="architectures for which every check passes"),
            y=alt.Y("library:N", title=None, sort="-x", axis=alt.Axis(labelLimit=200)),
            color=alt.Color(
                "weights:N",
                title="weights of each head",
                scale=alt.Scale(domain=list(WAYS), range=list(WAYS.values())),
            ),
        )
        .properties(width=440, height=130)
        .configure_view(stroke=None)
        .configure_axis(grid=False)
    )


if __name__ == "__main__":
    write(figure(rows()), rows(), OUT)
