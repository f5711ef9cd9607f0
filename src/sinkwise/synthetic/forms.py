"""The experiments by name: the kinds of task, their forms, and the mitigations of each."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from sinkwise.errors import InputError
from sinkwise.synthetic.broadcast import Broadcast
from sinkwise.synthetic.damping import Damping
from sinkwise.synthetic.paper_tasks import (
    ActiveDamping,
    CausalDamping,
    PreNormBroadcast,
    SweepDamping,
)
from sinkwise.synthetic.task import Task

FORMS: dict[str, dict[str, Task]] = {
    "nop": {
        "fast": Damping(),
        "no-null": Damping(common_norm=0.5, null_norm=None),
        "causal": CausalDamping(batch=256, steps=3000),
        "sweep": SweepDamping(batch=256, steps=1000),
    },
    "broadcast": {
        "deep": Broadcast(),
        "concave": Broadcast(modular="concave", steps=600),
        "plain": Broadcast(modular="none"),
        "authors": PreNormBroadcast(batch=256, steps=3000),
    },
    "registers": {
        "local": Broadcast(
            modular="none", local=True, num_registers=1, steps=1500, weight_decay=0.1
        ),
    },
}
"""The tasks by kind and form; the first form of a kind is the default. The authors train their
forms with batches of 1024 samples, here they have 256."""

MITIGATIONS = (
    "none",
    "gate",
    "headwise-gate",
    "register",
    "both",
    "sink-logit",
    "softmax-one",
    "global-pathway",
    "strong-null-gate",
    "control",
)
"""What can be added to a model. `both`: a gate and a register. `strong-null-gate`: a gate, and
a null token with the norm of the content. `control`: no mitigation, but nothing to damp."""

IDLE_SHARE = 0.05
"""A layer with less than this share of all layers' squared updates counts as idle."""

_GATES: dict[str, dict[str, Any]] = {
    "gate": {"gate": "elementwise"},
    "headwise-gate": {"gate": "headwise"},
}

_SOFTMAX_OR_PATHWAY: dict[str, dict[str, Any]] = {
    "sink-logit": {"softmax": "learnable"},
    "softmax-one": {"softmax": "off-by-one"},
    "global-pathway": {"pathway": True},
}

_BROADCAST_CHANGES: dict[str, dict[str, Any]] = {
    "register": {"num_registers": 1},
    "both": {"num_registers": 1, "gate": "elementwise"},
}

_DAMPING_CHANGES: dict[str, dict[str, Any]] = {
    "register": {"null_norm": None, "num_registers": 1},
    "both": {"null_norm": None, "num_registers": 1, "gate": "elementwise"},
    "strong-null-gate": {"null_norm": 1.0, "gate": "elementwise"},
    "control": {"null_norm": None, "aligned_share": 0.0},
}
"""In the damping task a register replaces the null token."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A task with a mitigation, and the verdicts that theory expects for its trained model."""

    kind: str
    form: str
    mitigation: str
    task: Task
    expected: str
    """The expected verdicts in words."""
    right: Callable[[list[str], list[float]], bool]
    """Whether the verdicts are the expected ones. Takes the verdict of each layer's head and each
    layer's share of all squared updates: the verdict of an idle layer does not matter."""


def experiment(kind: str, form: str | None = None, mitigation: str = "none") -> Experiment:
    """An experiment by name. Raises InputError if there is no such experiment."""
    if kind not in FORMS:
        raise InputError(f"kind={kind!r} must be one of {', '.join(FORMS)}")
    form = next(iter(FORMS[kind])) if form is None else form
    if form not in FORMS[kind]:
        known = ", ".join(FORMS[kind])
        raise InputError(f"form={form!r} must be one of {known} for the kind {kind!r}")
    if mitigation not in MITIGATIONS:
        raise InputError(f"mitigation={mitigation!r} must be one of {', '.join(MITIGATIONS)}")
    task = _mitigated(kind, FORMS[kind][form], mitigation)
    if task is None:
        raise InputError(
            f"mitigation={mitigation!r} does not exist for the form {form!r} of {kind!r}"
        )
    expected, right = _expectation(kind, form, mitigation)
    return Experiment(
        kind=kind, form=form, mitigation=mitigation, task=task, expected=expected, right=right
    )


def _mitigated(kind: str, task: Task, mitigation: str) -> Task | None:
    """The task with the mitigation; None if the task has no such mitigation."""
    if mitigation == "none":
        return task
    if mitigation in _GATES:
        return replace(task, **_GATES[mitigation])
    if kind == "registers" or isinstance(task, PreNormBroadcast):
        return None
    if isinstance(task, ActiveDamping):
        return replace(task, threshold=10.0) if mitigation == "control" else None
    if mitigation in _SOFTMAX_OR_PATHWAY:
        return replace(task, **_SOFTMAX_OR_PATHWAY[mitigation])
    assert isinstance(task, Broadcast | Damping)
    if mitigation == "strong-null-gate" and (isinstance(task, Broadcast) or not task.num_unscored):
        return None
    changes = _BROADCAST_CHANGES if isinstance(task, Broadcast) else _DAMPING_CHANGES
    return replace(task, **changes[mitigation]) if mitigation in changes else None


def _expectation(
    kind: str, form: str, mitigation: str
) -> tuple[str, Callable[[list[str], list[float]], bool]]:
    if kind == "nop":
        if _without_sink(form, mitigation):
            return "no sink", lambda verdicts, shares: verdicts == ["none"]
        if form == "sweep":
            # Its norm rescales every token; the sink's value compensates, so it is not zero.
            return (
                "a sink with a small value",
                lambda verdicts, shares: verdicts[0] in ("nop", "unclassified"),
            )
        return "a NOP sink", lambda verdicts, shares: verdicts == ["nop"]
    if kind == "registers" and mitigation == "none":
        return (
            "the register is a NOP sink in layer 0 and broadcasts in layer 1",
            lambda verdicts, shares: verdicts == ["nop", "broadcast"],
        )
    if kind == "registers":
        return (
            "the register broadcasts in layer 1; the gate of layer 0 is closed",
            lambda verdicts, shares: verdicts[1] == "broadcast" and shares[0] < IDLE_SHARE,
        )
    if form in ("deep", "concave"):
        return (
            "one layer broadcasts, the other is idle",
            lambda verdicts, shares: _working(verdicts, shares) == ["broadcast"],
        )
    if form == "authors":
        return "a broadcast in layer 1", lambda verdicts, shares: verdicts[1] == "broadcast"
    return (
        "every layer that is not idle broadcasts",
        lambda verdicts, shares: set(_working(verdicts, shares)) == {"broadcast"},
    )


def _without_sink(form: str, mitigation: str) -> bool:
    """Whether the NOP queries of the damping task should attend to no token in particular."""
    if form == "no-null":
        # A register is as easy to attend to as a strong null token, so the gate stays open.
        return mitigation not in ("register", "both")
    # If the content has no common direction, a sink logit takes the same share from every query;
    # only the null token then serves the NOP queries and no others.
    return mitigation in ("gate", "headwise-gate", "both", "global-pathway", "control")


def _working(verdicts: list[str], shares: list[float]) -> list[str]:
    """The verdicts of the layers that are not idle."""
    pairs = zip(verdicts, shares, strict=True)
    return [verdict for verdict, share in pairs if share >= IDLE_SHARE]
