"""The chart of the sink logit: its share of the softmax, and the norm of the output."""

from collections.abc import Iterable
from typing import Any

from sinkwise.reports.line_figure import line_figure
from sinkwise.synthetic.logit import LogitPoint, sink_logit_point

LEAST, GREATEST, STEP = -4.0, 8.0, 0.25
"""Range and step of the chart's sink logits."""


def logit_curve(logits: Iterable[int | float]) -> list[LogitPoint]:
    """The example at each of the given sink logits."""
    return [sink_logit_point(float(logit)) for logit in logits]


def logit_figure() -> Any:
    """An Altair chart of the output's norm and the sink's share against the sink logit."""
    count = round((GREATEST - LEAST) / STEP) + 1
    points = logit_curve(LEAST + STEP * index for index in range(count))
    return line_figure(
        {
            "norm of the head's output": [(p.sink_logit or 0.0, p.output_norm) for p in points],
            "share of the sink": [(p.sink_logit or 0.0, p.sink_share) for p in points],
        },
        title="A sink logit lets a head write nothing",
        subtitle="one query that matches none of six tokens",
        x="sink logit",
        y="",
    )
