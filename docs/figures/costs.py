"""The chart of bench/README.md: what a scan costs beside a plain forward pass.

python docs/figures/costs.py
"""

from typing import Any

import altair as alt
from page_tables import DOCS, ROOT, measured, table, write

PAGE, OUT = ROOT / "bench" / "README.md", DOCS / "costs.png"
VARIANTS = {"scan": "#3b6fb6", "screen": "#7fa8d8", "eager": "#e0a030", "caching": "#d1495b"}


def rows() -> list[dict[str, Any]]:
    """One row per case and variant: time and memory in units of the plain forward pass."""
    found = []
    for line in table(PAGE, "| case | plain, ms |"):
        plain = measured(line["MiB: plain"])
        assert plain is not None
        for variant in VARIANTS:
            time, memory = measured(line[variant]), measured(line[f"{variant} #2"])
            assert time is not None and memory is not None
            found.append(
                {
                    "case": line["case"],
                    "variant": variant,
                    "time": time.mean,
                    "memory": memory.mean / plain.mean,
                }
            )
    return found


def figure(found: list[dict[str, Any]]) -> Any:
    """Time and memory, a group of bars per case."""

    def panel(field: str, title: str, domain: list[float]) -> Any:
        base = alt.Chart(alt.Data(values=found)).encode(
            x=alt.X(
                f"{field}:Q",
                title=title,
                scale=alt.Scale(type="log", domain=domain, nice=False),
                axis=alt.Axis(values=[1, 2, 5, 10, 20, 50]),
            ),
            y=alt.Y("case:N", title=None, axis=alt.Axis(labelLimit=200)),
            yOffset=alt.YOffset("variant:N", sort=list(VARIANTS)),
        )
        bars = base.mark_bar().encode(
            x2=alt.datum(1),
            color=alt.Color(
                "variant:N",
                title=None,
                sort=list(VARIANTS),
                scale=alt.Scale(domain=list(VARIANTS), range=list(VARIANTS.values())),
            ),
        )
        text = base.transform_calculate(end=f"max(1, datum.{field})").mark_text(
            align="left", dx=4, fontSize=9
        )
        text = text.encode(x="end:Q", text=alt.Text(f"{field}:Q", format=".2f"))
        return (bars + text).properties(width=270, height=230)

    return (
        alt.hconcat(
            panel("time", "time / plain forward", [0.9, 9]),
            panel("memory", "memory above the model / plain forward", [0.7, 90]),
        )
        .configure_view(stroke=None)
        .configure_axis(grid=False)
    )


if __name__ == "__main__":
    write(figure(rows()), rows(), OUT)
