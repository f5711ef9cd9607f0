"""The experiments that are read together: mechanisms against mitigations, and the sweep."""

from collections.abc import Callable
from dataclasses import replace

from sinkwise.synthetic.damping import SweepDamping
from sinkwise.synthetic.forms import Experiment, experiment

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
"""Mechanism, form and mitigation of the cross-experiments."""

THRESHOLDS = (-1.5, -1.0, -0.7, -0.3, 0.0, 0.3, 0.5, 0.7, 1.0, 10.0)
"""Thresholds of the sweep at gamma 0; at 10 every query is a NOP query, and nothing is damped."""

RARE = 0.3, 3000
"""From this threshold on fewer tokens are active, and training takes so many steps: in 1,000 the
sink does not always grow."""

GAMMAS = (0.1, 0.5, 1.0)
"""What is left of an active token, at threshold 0; at 1 nothing is damped."""


def cross_experiments() -> list[Experiment]:
    """All cross-experiments."""
    return [experiment(*names) for names in CROSS]


def sweep_experiments() -> list[Experiment]:
    """The authors' sweep form over thresholds, then over gammas."""
    base = experiment("nop", "sweep")
    assert isinstance(base.task, SweepDamping)
    tasks = [
        replace(base.task, threshold=threshold, steps=RARE[1])
        if RARE[0] <= threshold < 10
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
    """The rule asks for 0.3 of all queries, a sample at a time."""
    if task.nop_share > 1 - 1e-6 or task.gamma == 1 or task.nop_share < 0.2:
        return "no sink", lambda verdicts, shares: verdicts == ["none"]
    if task.nop_share < 0.35:
        return (
            "a sink with a small value, or in too few samples",
            lambda verdicts, shares: verdicts[0] in ("nop", "unclassified", "none"),
        )
    return (
        "a sink with a small value",
        lambda verdicts, shares: verdicts[0] in ("nop", "unclassified"),
    )
