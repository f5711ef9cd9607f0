"""The page of the cross-experiments: which mitigation answers which mechanism."""

from collections.abc import Sequence
from typing import Any

from sinkwise.experiments.running import Trained
from sinkwise.reports.bar_figure import bar_figure
from sinkwise.reports.page import Figure, Page, Section
from sinkwise.reports.synthetic_table import HEADINGS, summary_rows

Groups = Sequence[Sequence[Trained]]


def _mean(runs: Sequence[Trained], column: str, layer: int) -> float:
    values = [run.rows[column][layer] for run in runs]
    return sum(values) / len(values)


def _bars(groups: Groups, kind: str, column: str) -> dict[str, float]:
    bars = {}
    for runs in groups:
        one = runs[0].experiment
        if one.kind != kind:
            continue
        layers = len(runs[0].rows)
        for layer in range(layers):
            name = f"{one.form}, {one.mitigation}" + (f", layer {layer}" if layers > 1 else "")
            bars[name] = _mean(runs, column, layer)
    return bars


def cross_charts(groups: Groups) -> dict[str, Any]:
    """The largest column, the value ratio and the gate of every experiment; who does the work."""
    found = {
        "nop-largest": bar_figure(
            _bars(groups, "nop", "largest"),
            title="NOP: the most attended token",
            subtitle="mean attention that it receives; half of the queries are NOP queries",
            x="received attention",
            thresholds={"rule": 0.3},
        ),
        "nop-ratio": bar_figure(
            _bars(groups, "nop", "value_ratio"),
            title="NOP: value of token 0 or of the register",
            x="value ratio",
            thresholds={"NOP": 0.2, "broadcast": 0.5},
        ),
    }
    for kind, title in (("broadcast", "Broadcast"), ("registers", "Local with a register")):
        found[f"{kind}-share"] = bar_figure(
            _bars(groups, kind, "update_share"),
            title=f"{title}: who writes",
            subtitle="share of the squared updates of all layers",
            x="share of updates",
        )
        found[f"{kind}-ratio"] = bar_figure(
            _bars(groups, kind, "value_ratio"),
            title=f"{title}: value of the sink",
            x="value ratio",
            thresholds={"NOP": 0.2, "broadcast": 0.5},
        )
    return found


def cross_page(groups: Groups, found: dict[str, Any]) -> Page:
    """The page of the cross-experiments, with their charts."""
    rows = [row for runs in groups for row in summary_rows(runs)]
    return Page(
        title="Two mechanisms, two mitigations",
        lead=["Minimal models that must invent each mechanism, with each mitigation put in."],
        sections=[
            Section(
                heading="All numbers",
                paragraphs=["Means over the seeds, with the least and the greatest."],
                table=[HEADINGS, *rows],
            ),
            Section(heading="Figures", figures=[Figure(chart) for chart in found.values()]),
        ],
        footer="Written by `sinkwise synthetic cross`; every number follows from the seeds.",
    )
