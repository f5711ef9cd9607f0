"""The page of all mechanisms with all mitigations: which mitigation fits which mechanism."""

from collections.abc import Sequence
from typing import Any

from sinkwise.experiments.evaluation import event_rules
from sinkwise.experiments.experiment_run import ExperimentRun
from sinkwise.reports.bar_figure import bar_figure
from sinkwise.reports.page import Figure, Page, Section
from sinkwise.reports.synthetic_table import COLUMN_NOTES, HEADINGS, RANGES, summary_rows
from sinkwise.reports.thresholds import value_ratio_thresholds

Groups = Sequence[Sequence[ExperimentRun]]


def _mean(runs: Sequence[ExperimentRun], column: str, layer: int) -> float:
    values = [run.rows[column][layer] for run in runs]
    return sum(values) / len(values)


def _bars(groups: Groups, kind: str, column: str) -> dict[str, float]:
    bars = {}
    for runs in groups:
        experiment = runs[0].experiment
        if experiment.kind != kind:
            continue
        layers = len(runs[0].rows)
        for layer in range(layers):
            name = f"{experiment.form}, {experiment.mitigation}"
            name += f", layer {layer}" if layers > 1 else ""
            bars[name] = _mean(runs, column, layer)
    return bars


def cross_charts(groups: Groups) -> dict[str, Any]:
    """Bar charts of received attention, value ratios and shares of the updates, by file name."""
    rules = event_rules(groups[0][0].experiment.task)
    ratios = value_ratio_thresholds(rules.mechanism)
    charts = {
        "nop-largest": bar_figure(
            _bars(groups, "nop", "largest"),
            title="NOP task: the most attended token",
            subtitle="mean over the queries, half of which are NOP queries",
            x="received attention",
            thresholds={"event rule": rules.bidirectional.floor},
        ),
        "nop-ratio": bar_figure(
            _bars(groups, "nop", "value_ratio"),
            title="NOP task: value ratio of the first token or register",
            x="value ratio",
            thresholds=ratios,
        ),
    }
    for kind, title in (
        ("broadcast", "Broadcast task"),
        ("registers", "Local broadcast with a register"),
    ):
        charts[f"{kind}-share"] = bar_figure(
            _bars(groups, kind, "update_share"),
            title=f"{title}: which layer does the work",
            subtitle="share of all layers' squared updates",
            x="share of the updates",
        )
        charts[f"{kind}-ratio"] = bar_figure(
            _bars(groups, kind, "value_ratio"),
            title=f"{title}: value ratio of the sink",
            x="value ratio",
            thresholds=ratios,
        )
    return charts


def cross_page(groups: Groups, charts: dict[str, Any]) -> Page:
    """The page of all mechanisms with all mitigations, with its charts."""
    rows = [row for runs in groups for row in summary_rows(runs)]
    return Page(
        title="Two mechanisms, two mitigations",
        lead=[
            "Each task needs one of the two mechanisms. Each model was trained on it with one of "
            "the mitigations: does the sink that the task calls for still form?"
        ],
        sections=[
            Section(heading="Charts", figures=[Figure(chart) for chart in charts.values()]),
            Section(
                heading="All numbers",
                paragraphs=[RANGES, COLUMN_NOTES],
                table=[HEADINGS, *rows],
            ),
        ],
        footer="Written by “sinkwise synthetic cross”. The seeds determine every number.",
    )
