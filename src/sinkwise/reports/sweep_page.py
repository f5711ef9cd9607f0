"""The page of the authors' sweep: attention to the sink against the share of NOP queries."""

from collections.abc import Sequence
from typing import Any

from sinkwise.experiments.experiment_run import ExperimentRun
from sinkwise.reports.bar_figure import bar_figure
from sinkwise.reports.line_figure import line_figure
from sinkwise.reports.page import Figure, Page, Section
from sinkwise.reports.synthetic_table import COLUMN_NOTES, HEADINGS, RANGES, summary_rows
from sinkwise.synthetic.paper_tasks import SweepDamping

Groups = Sequence[Sequence[ExperimentRun]]


def _points(groups: Groups) -> list[tuple[SweepDamping, float]]:
    """Each task with its mean attention to position 0."""
    points = []
    for runs in groups:
        task = runs[0].experiment.task
        assert isinstance(task, SweepDamping)
        points.append((task, sum(run.rows["mass"][0] for run in runs) / len(runs)))
    return points


def sweep_charts(groups: Groups) -> dict[str, Any]:
    """Attention to position 0 against the share of NOP queries, and against gamma."""
    points = _points(groups)
    swept = [
        (task.nop_share, mass)
        for task, mass in points
        if task.gamma == 0 and task.nop_share < 1 - 1e-6
    ]
    return {
        "sweep": line_figure(
            {"position 0": swept, "share of NOP queries": [(share, share) for share, _ in swept]},
            title="Queries that need no update attend to the sink",
            x="share of NOP queries",
            y="mean attention to position 0",
            points=True,
        ),
        "gamma": bar_figure(
            {
                f"threshold {task.threshold:g}, gamma {task.gamma:g}": mass
                for task, mass in points
                if task.threshold in (0.0, 10.0)
            },
            title="With nothing to damp, no sink forms",
            subtitle="mean attention to position 0",
            x="attention",
        ),
    }


def sweep_page(groups: Groups, charts: dict[str, Any]) -> Page:
    """The page of the sweep, with its charts."""
    rows = [row for runs in groups for row in summary_rows(runs)]
    return Page(
        title="Conditional damping: the sweep",
        lead=[
            f"{SweepDamping.summary} The threshold determines how many tokens are active: "
            "attention to the sink, position 0, follows the share of all other queries."
        ],
        sections=[
            Section(heading="Charts", figures=[Figure(chart) for chart in charts.values()]),
            Section(
                heading="All numbers", paragraphs=[RANGES, COLUMN_NOTES], table=[HEADINGS, *rows]
            ),
        ],
        footer="Written by “sinkwise synthetic sweep”. The seeds determine every number.",
    )
