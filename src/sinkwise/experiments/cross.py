"""The experiments that are read together: mechanisms against mitigations, and the sweep."""

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

RARE_STEPS = 3000
"""Training steps at threshold 1, where few tokens are active: at 1,000 there is no sink yet."""

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
        replace(base.task, threshold=threshold, steps=RARE_STEPS)
        if threshold == 1
        else replace(base.task, threshold=threshold)
        for threshold in THRESHOLDS
    ]
    tasks += [replace(base.task, gamma=gamma) for gamma in GAMMAS]
    found = []
    for task in tasks:
        idle = task.nop_share > 1 - 1e-6 or task.gamma == 1
        # The mean rule asks for a share of 0.3 of all queries.
        sink = not idle and task.nop_share > 0.35
        found.append(
            replace(
                base,
                mitigation=f"threshold {task.threshold:g}, gamma {task.gamma:g}",
                task=task,
                expected="a sink" if sink else "no sink by a rule that asks for 0.3",
                right=(lambda verdicts, shares: verdicts != ["none"])
                if sink
                else (lambda verdicts, shares: verdicts == ["none"]),
            )
        )
    return found
