"""A bar chart of named numbers, with thresholds as vertical lines."""

from collections.abc import Mapping
from typing import Any


def bar_figure(
    bars: Mapping[str, int | float],
    *,
    title: str,
    x: str,
    thresholds: Mapping[str, float] | None = None,
    subtitle: str = "",
) -> Any:
    """An Altair chart with one bar per name, in the given order, and named thresholds."""
    import altair as alt

    names = list(bars)
    rows = [{"name": name, "value": float(value)} for name, value in bars.items()]
    chart = (
        alt.Chart(alt.Data(values=rows), title=alt.Title(title, subtitle=subtitle))
        .mark_bar(color="#3b6fb6", height=16)
        .encode(
            x=alt.X("value:Q", title=x, axis=alt.Axis(grid=False, tickCount=5)),
            y=alt.Y("name:N", title=None, sort=names, axis=alt.Axis(labelLimit=260)),
        )
    )
    text = chart.mark_text(align="left", dx=4).encode(text=alt.Text("value:Q", format=".2f"))
    layers = [chart, text]
    for word, value in (thresholds or {}).items():
        rule = alt.Chart(alt.Data(values=[{"value": value, "word": word}]))
        layers.append(rule.mark_rule(strokeDash=[4, 3], color="#555").encode(x="value:Q"))
        layers.append(
            rule.mark_text(align="left", dx=3, dy=-4, color="#555").encode(
                x="value:Q", y=alt.value(0), text="word:N"
            )
        )
    return (
        alt.layer(*layers).properties(width=300, height=26 * len(names)).configure_view(stroke=None)
    )
