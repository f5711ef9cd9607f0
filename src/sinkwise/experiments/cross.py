"""The sets of experiments: every mechanism with every mitigation, and the authors' sweep."""

from collections.abc import Callable
from dataclasses import replace

from sinkwise.diagnosis.rules import MeanRule
from sinkwise.synthetic.forms import Experiment, experiment
from sinkwise.synthetic.paper_tasks import SweepDamping

CROSS = (
    ("nop", "fast", "none"),
    ("nop", "fast", "control"),
    ("nop", "fast", "gate"),
    ("nop", "fast", "headwise-gate"),
    ("nop", "fast", "register"),
    ("nop", "fast", "both"),
    ("nop", "fast", "strong-null-gate"),
    ("broadcast", "plain", "none"),
    ("broadcast", "deep", "none"),
    ("broadcast", "deep", "gate"),
    ("broadcast", "deep", "register"),
    ("broadcast", "concave", "none"),
    ("broadcast", "concave", "gate"),
    ("registers", "local", "none"),
    ("registers", "local", "gate"),
)
"""Kind, form and mitigation of each experiment in `sinkwise synthetic cross`."""

THRESHOLDS = (-1.5, -1.0, -0.7, -0.3, 0.0, 0.3, 0.5, 0.7, 1.0, 10.0)
"""Thresholds of the sweep at gamma 0; at 10 every query is a NOP query, and nothing is damped."""

RARE_THRESHOLD, RARE_STEPS = 0.3, 3000
"""At this threshold or more, active tokens are rare and training takes more steps: with 1,000 the
sink does not always form."""

GAMMAS = (0.1, 0.5, 1.0)
"""Factors on an active token, at threshold 0; at 1 nothing is damped."""


def cross_experiments() -> list[Experiment]:
    """Every mechanism with every mitigation."""
    return [experiment(*names) for names in CROSS]


def sweep_experiments() -> list[Experiment]:
    """The authors' sweep form, over thresholds and then over gammas."""
    base = experiment("nop", "sweep")
    assert isinstance(base.task, SweepDamping)
    tasks = [
        replace(base.task, threshold=threshold, steps=RARE_STEPS)
        if RARE_THRESHOLD <= threshold < 10
        else replace(base.task, threshold=threshold)
        for threshold in THRESHOLDS
    ]
    tasks += [replace(base.task, gamma=gamma) for gamma in GAMMAS]
    return [
        replace(
            base,
            mitigation=f"threshold {task.threshold:g}, gamma {task.gamma:g}",
            task=task,
            expected=expected,
            right=right,
        )
        for task in tasks
        for expected, right in [_expectation(task)]
    ]


def _expectation(task: SweepDamping) -> tuple[str, Callable[[list[str], list[float]], bool]]:
    """The expected verdict: the sink receives about as much attention as there are NOP queries.

    A sample's own share of NOP queries varies, so near the rule's threshold either verdict fits.
    """
    threshold = MeanRule().threshold
    if task.nop_share > 1 - 1e-6 or task.gamma == 1 or task.nop_share < threshold - 0.1:
        return "no sink", lambda verdicts, shares: verdicts == ["none"]
    if task.nop_share < threshold + 0.05:
        return (
            "a sink with a small value, or in too few samples",
            lambda verdicts, shares: verdicts[0] in ("nop", "unclassified", "none"),
        )
    return (
        "a sink with a small value",
        lambda verdicts, shares: verdicts[0] in ("nop", "unclassified"),
    )
