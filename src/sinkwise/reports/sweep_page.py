"""The page of the authors' sweep: the sink's attention against the share of NOP queries."""

from collections.abc import Sequence
from typing import Any

from sinkwise.experiments.running import Trained
from sinkwise.reports.bar_figure import bar_figure
from sinkwise.reports.line_figure import line_figure
from sinkwise.reports.page import Figure, Page, Section
from sinkwise.reports.synthetic_table import HEADINGS, summary_rows
from sinkwise.synthetic.damping import SweepDamping

Groups = Sequence[Sequence[Trained]]


def _points(groups: Groups) -> list[tuple[SweepDamping, float]]:
    """Each task with the mean attention to position 0."""
    found = []
    for runs in groups:
        task = runs[0].experiment.task
        assert isinstance(task, SweepDamping)
        found.append((task, sum(run.rows["mass"][0] for run in runs) / len(runs)))
    return found


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
            title="The sink takes the queries that have nothing to do",
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
            title="What an active token must lose",
            subtitle="mean attention to position 0",
            x="attention",
        ),
    }


def sweep_page(groups: Groups, found: dict[str, Any]) -> Page:
    """The page of the sweep, with its charts."""
    rows = [row for runs in groups for row in summary_rows(runs)]
    return Page(
        title="Conditional damping: the sweep",
        lead=[
            "An active token must end as gamma times itself, all others must stay as they are. The "
            "threshold decides how many are active."
        ],
        sections=[
            Section(heading="Figures", figures=[Figure(chart) for chart in found.values()]),
            Section(heading="All numbers", table=[HEADINGS, *rows]),
        ],
        footer="Written by `sinkwise synthetic sweep`; every number follows from the seeds.",
    )
