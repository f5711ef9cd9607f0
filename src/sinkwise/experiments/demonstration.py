"""The embedded demonstration: each mechanism, with the right and with the wrong mitigation."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sinkwise.diagnosis.rules import RelaxedRule, Rules
from sinkwise.experiments.edits import error_after
from sinkwise.experiments.running import layout_of, relative_error
from sinkwise.mitigations.loading import load
from sinkwise.scanning.result import Scan, check_target
from sinkwise.scanning.scan import scan
from sinkwise.synthetic.shipped import TASKS, shipped
from sinkwise.synthetic.signature import Signature, signatures

WORDS = {
    "nop": "was trained to leave most tokens alone (conditional damping). Its head looks at token "
    "0, whose value is near zero: an adaptive NOP.",
    "nop-gate": "is the same with a gate: the right answer. The stripe is gone.",
    "nop-register": "is the same with a register: the wrong answer. The register is the new NOP "
    "sink.",
    "broadcast": "was trained to tell everyone what one marked token says (global broadcast). "
    "Layer 0 writes that token's payload to all; layer 1 has nothing left to add.",
    "broadcast-gate": "is the same with a gate: the wrong answer. The stripe stays.",
    "broadcast-register": "is the same with a register, and tokens that see nothing else but "
    "themselves: the right answer. The register collects the payload in layer 0, where the other "
    "tokens use it as a NOP, and broadcasts it in layer 1.",
}
"""What each model was trained to do."""

SHOWN_LAYER = {name: 1 if name == "broadcast-register" else 0 for name in WORDS}
"""The layer whose map is shown: the one that does the work."""

RULE = RelaxedRule(min_times_uniform=1.5)
"""Tokens of the local model see two keys, so uniform attention would give each a half."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Demonstrated:
    """One shipped model and what was seen of it."""

    name: str
    scan: Scan
    layers: list[Signature]
    error: float
    """Squared error over the squared update that the task asks for; 0 is perfect."""
    error_zeroed: float
    """The same with the sink's value set to zero in the shown layer."""
    error_ordinary: float
    """The same with an ordinary token's value in its place."""

    @property
    def shown(self) -> Signature:
        """The layer that does the work."""
        return self.layers[SHOWN_LAYER[self.name]]


def run_demo(out: Path) -> Iterator[Demonstrated]:
    """Diagnose the shipped models, one after the other. Raises InputError where `out` cannot hold
    their scans.
    """
    for name in TASKS:
        check_target(out / name)
    for name in TASKS:
        model, task, sample = shipped(name)
        sink, layer = task.sink(sample), SHOWN_LAYER[name]
        found = scan(
            load(f"demo:{name}"),
            [sample.inputs],
            rules=Rules(causal=RULE, bidirectional=RULE),
            layout=layout_of(task),
        )
        yield Demonstrated(
            name=name,
            scan=found,
            layers=signatures(model, sample.inputs, sink),
            error=relative_error(task, model, sample),
            error_zeroed=error_after(task, model, sample, sink, layer, "zero"),
            error_ordinary=error_after(task, model, sample, sink, layer, "ordinary"),
        )
