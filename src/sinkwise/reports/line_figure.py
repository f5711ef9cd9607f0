"""A line chart of named curves: a loss, a spectrum, or a number against a varied quantity."""

from collections.abc import Mapping, Sequence
from typing import Any


def line_figure(
    curves: Mapping[str, Sequence[tuple[int | float, int | float]]],
    *,
    title: str,
    x: str,
    y: str,
    log: bool = False,
    points: bool = False,
    subtitle: str = "",
) -> Any:
    """An Altair chart of curves by name; with `log` the y axis is logarithmic, without zeros."""
    import altair as alt

    rows = [
        {"x": float(at), "y": float(value), "name": name, "order": order}
        for order, (name, curve) in enumerate(curves.items())
        for at, value in curve
        if not log or value > 0
    ]
    scale = alt.Scale(type="log") if log else alt.Scale(zero=True)
    names = list(curves)
    legend = alt.Legend(title=None) if len(names) > 1 else None
    return (
        alt.Chart(alt.Data(values=rows), title=alt.Title(title, subtitle=subtitle))
        .mark_line(point=points, strokeWidth=2)
        .encode(
            x=alt.X("x:Q", title=x, axis=alt.Axis(grid=False)),
            y=alt.Y("y:Q", title=y, scale=scale),
            color=alt.Color(
                "name:N", sort=names, legend=legend, scale=alt.Scale(scheme="tableau10")
            ),
        )
        .properties(width=320, height=220)
        .configure_view(stroke=None)
    )
