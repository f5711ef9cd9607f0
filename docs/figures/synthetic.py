"""The chart of docs/synthetic.md: attention to the sink, its value ratio and the verdict.

python docs/figures/synthetic.py
"""

from typing import Any

import altair as alt
from page_tables import COLORS, DOCS, measured, table, write

PAGE, OUT = DOCS / "synthetic.md", DOCS / "synthetic.png"
NONE = "#c9ced6"


def rows() -> list[dict[str, Any]]:
    """One row per experiment and layer of the table of all mechanisms and mitigations.

    Attention is that of the NOP queries where the task has any, else that of all queries.
    """
    found, name = [], ""
    for line in table(PAGE, "| experiment | layer | error | attention, NOP"):
        name = line["experiment"] or name
        given = measured(line["attention, NOP queries"]) or measured(line["others"])
        ratio = measured(line["value ratio"])
        assert given is not None and ratio is not None
        verdict = max(line["verdicts"].split(", "), key=_count).partition(" ")[0]
        found.append(
            {
                "experiment": f"{name}, layer {line['layer']}",
                "attention": given.mean,
                "ratio": ratio.mean,
                "low": ratio.low,
                "high": ratio.high,
                "verdict": verdict,
            }
        )
    return found


def _count(verdict: str) -> int:
    number = verdict.rpartition(" ")[2]
    return int(number) if number.isdigit() else 1


def figure(found: list[dict[str, Any]]) -> Any:
    """Attention beside value ratio, coloured by what most seeds' scans say."""
    names = [row["experiment"] for row in found]
    colors = {**COLORS, "none": NONE}
    colors.pop("mixed")
    color = alt.Color(
        "verdict:N",
        title="verdict of most seeds",
        scale=alt.Scale(domain=list(colors), range=list(colors.values())),
        legend=alt.Legend(orient="top"),
    )

    def panel(field: str, title: str, axis: alt.Axis, domain: list[float]) -> Any:
        return alt.Chart(alt.Data(values=found)).encode(
            x=alt.X(f"{field}:Q", title=title, scale=alt.Scale(domain=domain)),
            y=alt.Y("experiment:N", title=None, sort=names, axis=axis),
            color=color,
        )

    left = panel("attention", "attention to the sink", alt.Axis(labelLimit=220), [0, 1])
    right = panel("ratio", "value ratio (range over seeds)", alt.Axis(labels=False), [0, 1.2])
    limits = alt.Chart(alt.Data(values=[{"at": 0.2}, {"at": 0.5}])).mark_rule(
        strokeDash=[4, 3], color="#666"
    )
    right = alt.layer(
        limits.encode(x="at:Q"),
        right.mark_rule(strokeWidth=2).encode(x="low:Q", x2="high:Q"),
        right.mark_point(filled=True, size=60, opacity=1),
    )
    height = 17 * len(names)
    return (
        alt.hconcat(
            left.mark_bar().properties(width=260, height=height),
            right.properties(width=260, height=height),
        )
        .configure_view(stroke=None)
        .configure_axis(grid=False)
    )


if __name__ == "__main__":
    write(figure(rows()), rows(), OUT)
