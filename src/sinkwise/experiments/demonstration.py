"""The built-in demonstration: each mechanism, with the right and with the wrong mitigation."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sinkwise.diagnosis.rules import RelaxedRule, Rules
from sinkwise.experiments.edits import error_after
from sinkwise.experiments.evaluation import relative_error, token_layout
from sinkwise.mitigations.loading import load
from sinkwise.scanning.result import Scan, check_target
from sinkwise.scanning.scan import scan
from sinkwise.synthetic.shipped import TASKS, load_shipped
from sinkwise.synthetic.signature import Signature, signatures

DESCRIPTIONS = {
    "nop": "must leave most tokens unchanged (conditional damping). Its head attends to token 0, "
    "whose value is near zero: an adaptive NOP.",
    "nop-gate": "has the same task and a gate: the right mitigation. The sink is gone.",
    "nop-register": "has the same task and a register: the wrong mitigation. The register is the "
    "new NOP sink.",
    "broadcast": "must send the payload of one marked token to all tokens (global broadcast). "
    "Layer 0 does so; layer 1 has nothing left to add.",
    "broadcast-gate": "has the same task and a gate: the wrong mitigation. The sink stays.",
    "broadcast-register": "has the same task and a register, and each token sees only itself and "
    "the register: the right mitigation. In layer 0 the register collects the payload, while the "
    "other tokens use it as a NOP; in layer 1 it broadcasts.",
}
"""Each model's task and what it learned; follows the model's name."""

MAIN_LAYER = {name: 1 if name == "broadcast-register" else 0 for name in DESCRIPTIONS}
"""The layer that solves the task; the demonstration shows its attention map."""

RULE = RelaxedRule(min_times_uniform=1.5)
"""Tokens of the local model see two keys, so uniform attention gives each of them 0.5."""

RULES = Rules(causal=RULE, bidirectional=RULE)
"""The rules of the demonstration's scans."""


@dataclass(frozen=True, eq=False, kw_only=True)
class DemoResult:
    """One shipped model with its scan and measurements."""

    name: str
    scan: Scan
    signature: Signature
    """The signature of the main layer."""
    error: float
    """Squared error relative to the squared update that the task requires; 0 is perfect."""
    error_zeroed: float
    """The same with the sink's value set to zero in the main layer."""
    error_ordinary: float
    """The same with an ordinary token's value in its place."""


def run_demo(out: Path) -> Iterator[DemoResult]:
    """Diagnose the shipped models, one after the other.

    Raises InputError if their scans cannot be saved in `out`.
    """
    for name in TASKS:
        check_target(out / name)
    for name in TASKS:
        model, task, batch = load_shipped(name)
        sink, layer = task.sink(batch), MAIN_LAYER[name]
        result = scan(
            load(f"demo:{name}"),
            [batch.inputs],
            rules=RULES,
            layout=token_layout(task),
        )
        yield DemoResult(
            name=name,
            scan=result,
            signature=signatures(model, batch.inputs, sink)[layer],
            error=relative_error(task, model, batch),
            error_zeroed=error_after(task, model, batch, sink, layer, "zero"),
            error_ordinary=error_after(task, model, batch, sink, layer, "ordinary"),
        )
