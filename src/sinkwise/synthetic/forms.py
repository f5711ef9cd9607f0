"""Which experiments there are: kinds of task, their forms, and what may be put in."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from sinkwise.errors import InputError
from sinkwise.synthetic.broadcast import Broadcast, PreNormBroadcast
from sinkwise.synthetic.damping import ActiveDamping, CausalDamping, Damping, SweepDamping
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
"""The tasks by kind and form; the first form of a kind is its default. The authors' forms have a
batch of 256 here, theirs is 1024."""

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
"""What may be put into a model: `both` is a gate and a register; `strong-null-gate` a gate beside
a null token as long as the content; in a `control` there is nothing to damp."""

IDLE_SHARE = 0.05
"""A layer with less than this of all layers' squared updates writes next to nothing."""

_GATES: dict[str, dict[str, Any]] = {
    "gate": {"gate": "elementwise"},
    "headwise-gate": {"gate": "headwise"},
}

_OTHERS: dict[str, dict[str, Any]] = {
    "sink-logit": {"softmax": "learnable"},
    "softmax-one": {"softmax": "off-by-one"},
    "global-pathway": {"pathway": True},
}

_REGISTERS: dict[str, dict[str, Any]] = {
    "register": {"num_registers": 1},
    "both": {"num_registers": 1, "gate": "elementwise"},
}
"""What they change in a broadcast,"""

_WITHOUT_NULL: dict[str, dict[str, Any]] = {
    "register": {"null_norm": None, "num_registers": 1},
    "both": {"null_norm": None, "num_registers": 1, "gate": "elementwise"},
    "strong-null-gate": {"null_norm": 1.0, "gate": "elementwise"},
    "control": {"null_norm": None, "aligned_share": 0.0},
}
"""and in damping: a register stands where the null token was."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A task with a mitigation, and what the scan of its trained model must say."""

    kind: str
    form: str
    mitigation: str
    task: Task
    expected: str
    """The expected verdicts in words."""
    right: Callable[[list[str], list[float]], bool]
    """Whether the verdicts of the layers' heads are the expected ones, given each layer's share of
    all updates: a layer that writes next to nothing may be called anything."""


def experiment(kind: str, form: str | None = None, mitigation: str = "none") -> Experiment:
    """An experiment by name. Raises InputError for one that does not exist."""
    if kind not in FORMS:
        raise InputError(f"kind={kind!r} must be one of {', '.join(FORMS)}")
    form = next(iter(FORMS[kind])) if form is None else form
    if form not in FORMS[kind]:
        raise InputError(f"form={form!r} must be one of {', '.join(FORMS[kind])} for {kind}")
    if mitigation not in MITIGATIONS:
        raise InputError(f"mitigation={mitigation!r} must be one of {', '.join(MITIGATIONS)}")
    task = _mitigated(kind, FORMS[kind][form], mitigation)
    if task is None:
        raise InputError(f"mitigation={mitigation!r} does not fit the form {form!r} of {kind}")
    expected, right = _expectation(kind, form, mitigation)
    return Experiment(
        kind=kind, form=form, mitigation=mitigation, task=task, expected=expected, right=right
    )


def _mitigated(kind: str, task: Task, mitigation: str) -> Task | None:
    """The task with the mitigation; None where they do not fit."""
    if mitigation == "none":
        return task
    if mitigation in _GATES:
        return replace(task, **_GATES[mitigation])
    if kind == "registers" or isinstance(task, PreNormBroadcast):
        return None
    if isinstance(task, ActiveDamping):
        return replace(task, threshold=10.0) if mitigation == "control" else None
    if mitigation in _OTHERS:
        return replace(task, **_OTHERS[mitigation])
    assert isinstance(task, Broadcast | Damping)
    if mitigation == "strong-null-gate" and (isinstance(task, Broadcast) or not task.scored):
        return None
    changes = _REGISTERS if isinstance(task, Broadcast) else _WITHOUT_NULL
    return replace(task, **changes[mitigation]) if mitigation in changes else None


def _expectation(
    kind: str, form: str, mitigation: str
) -> tuple[str, Callable[[list[str], list[float]], bool]]:
    if kind == "nop":
        if _turns_away(form, mitigation):
            return "no sink", lambda found, shares: found == ["none"]
        if form == "sweep":
            # Its norm rescales every token, so the sink's value corrects that and is not zero.
            return (
                "a sink with a small value",
                lambda found, shares: found[0] in ("nop", "unclassified"),
            )
        return "a NOP sink", lambda found, shares: found == ["nop"]
    if kind == "registers" and mitigation == "none":
        return (
            "the register is a NOP sink in layer 0 and broadcasts in layer 1",
            lambda found, shares: found == ["nop", "broadcast"],
        )
    if kind == "registers":
        return (
            "the register broadcasts in layer 1; the gate of layer 0 is closed",
            lambda found, shares: found[1] == "broadcast" and shares[0] < IDLE_SHARE,
        )
    if form in ("deep", "concave"):
        return (
            "one layer broadcasts, the other writes next to nothing",
            lambda found, shares: _working(found, shares) == ["broadcast"],
        )
    if form == "authors":
        return "a broadcast in layer 1", lambda found, shares: found[1] == "broadcast"
    return (
        "every layer that writes broadcasts",
        lambda found, shares: set(_working(found, shares)) == {"broadcast"},
    )


def _turns_away(form: str, mitigation: str) -> bool:
    """Whether NOP queries of the damping task look at no token in particular."""
    if form == "no-null":
        # A register is as easy to find as a strong null token: a gate beside it stays open.
        return mitigation not in ("register", "both")
    # A sink logit takes the same from every query where content has no direction in common, so
    # that only the null token tells the NOP queries apart.
    return mitigation in ("gate", "headwise-gate", "both", "global-pathway", "control")


def _working(found: list[str], shares: list[float]) -> list[str]:
    """The verdicts of the layers that write something."""
    pairs = zip(found, shares, strict=True)
    return [verdict for verdict, share in pairs if share >= IDLE_SHARE]
