"""The chart of docs/mitigations.md: which mitigation removes which sink.

python docs/figures/mitigations.py
"""

import re
from typing import Any

import altair as alt
from page_tables import COLORS, DOCS, measured, table, write

PAGE, OUT = DOCS / "mitigations.md", DOCS / "mitigations.png"
NOP = "NOP task: NOP queries at the null token"
BROADCAST = "broadcast task: attention to the hub"
HEADS = {"board": "ViT, board: heads with a sink", "canvas": "ViT, canvas: heads with a sink"}


def rows() -> list[dict[str, Any]]:
    """One row per mitigation: attention on the synthetic tasks, heads by verdict on the ViTs."""
    found = []
    for line in table(PAGE, "| mitigation | NOP task"):
        row: dict[str, Any] = {"mitigation": line["mitigation"]}
        for name, column in (("nop", NOP), ("broadcast", BROADCAST)):
            value = measured(line[column])
            row[name] = None if value is None else value.mean
        for task, column in HEADS.items():
            heads, _, verdicts = line[column].partition(": ")
            row[task] = {word: int(n) for n, word in re.findall(r"(\d+) (\w+)", verdicts)}
            if sum(row[task].values()) != int(heads.partition("/")[0]):
                raise ValueError(f"{line['mitigation']}: {line[column]!r} does not add up")
        found.append(row)
    return found


def figure(found: list[dict[str, Any]]) -> Any:
    """Two panels of attention, two of heads."""
    names = [row["mitigation"] for row in found]

    def y(first: bool) -> alt.Y:
        axis = alt.Axis(labelLimit=140) if first else alt.Axis(labels=False, ticks=False)
        return alt.Y("mitigation:N", title=None, sort=names, axis=axis)

    def attention(name: str, title: str, verdict: str, first: bool = False) -> Any:
        data = [
            {
                "mitigation": row["mitigation"],
                "value": row[name] or 0,
                "label": "not run" if row[name] is None else f"{row[name]:.3g}",
            }
            for row in found
        ]
        base = alt.Chart(alt.Data(values=data), title=alt.Title(title, fontSize=12)).encode(
            x=alt.X(
                "value:Q", title="attention to it", scale=alt.Scale(domain=[0, 1.25]), axis=AXIS
            ),
            y=y(first),
        )
        text = base.mark_text(align="left", dx=3).encode(text="label:N")
        return (base.mark_bar(color=COLORS[verdict]) + text).properties(width=150)

    def heads(task: str, title: str) -> Any:
        data = [
            {"mitigation": row["mitigation"], "verdict": verdict, "heads": count}
            for row in found
            for verdict, count in row[task].items()
        ]
        return (
            alt.Chart(alt.Data(values=data), title=alt.Title(title, fontSize=12))
            .mark_bar()
            .encode(
                x=alt.X(
                    "heads:Q", title="heads with a sink, of 24", scale=alt.Scale(domain=[0, 24])
                ),
                y=y(False),
                color=alt.Color(
                    "verdict:N",
                    title=None,
                    scale=alt.Scale(domain=list(COLORS), range=list(COLORS.values())),
                ),
                order=alt.Order("verdict:N"),
            )
            .properties(width=150)
        )

    panels = [
        attention("nop", "NOP task: the null token", "nop", first=True),
        attention("broadcast", "Broadcast task: the hub", "broadcast"),
        heads("board", "ViT, idle queries (board)"),
        heads("canvas", "ViT, shared information (canvas)"),
    ]
    return alt.hconcat(*panels, spacing=14).configure_view(stroke=None).configure_axis(grid=False)


AXIS = alt.Axis(values=[0, 0.5, 1])


if __name__ == "__main__":
    write(figure(rows()), rows(), OUT)
