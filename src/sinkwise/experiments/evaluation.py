"""The evaluation of one trained model: error, the numbers of each layer, and a scan."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sinkwise.core.layout import TokenLayout, code
from sinkwise.diagnosis.rules import MeanRule, Rules
from sinkwise.scanning.result import Scan
from sinkwise.scanning.scan import scan
from sinkwise.synthetic.signature import Signature
from sinkwise.synthetic.task import Task, TaskBatch


def layer_row(task: Task, signature: Signature, batch: TaskBatch) -> dict[str, float]:
    """The numbers of one layer; NaN where there is nothing to average."""
    prefix = task.num_registers
    mass, gate = signature.mass[:, prefix:], signature.gate
    nop = task.idle(batch)
    active = ~nop
    active[:, : task.num_unscored] = False
    gates = torch.full_like(mass, math.nan) if gate is None else gate[:, prefix:]
    received = signature.attention.mean(1)
    moving = batch.marks.ndim == 1  # the sink's position differs between samples
    source = math.nan
    if moving and prefix:
        rows = torch.arange(len(batch.marks))
        source = float(signature.attention[rows, 0, batch.marks + prefix].mean())
    return {
        "mass_nop": float(mass[nop].mean()),
        "mass_active": float(mass[active].mean()),
        "mass": float(mass[:, task.num_unscored :].mean()),
        "largest": float(received.amax(1).mean() if moving else received.mean(0).max()),
        "register_to_source": source,
        "uniform": 1 / signature.attention.shape[-1],
        "column_share": signature.column_share,
        "value_ratio": float(signature.value_ratio.mean()),
        "value_ratio_raw": float(signature.value_ratio_raw.mean()),
        "stable_rank": float(signature.stable_rank.mean()),
        "spectral_gap": signature.spectral_gap,
        "spike": float(signature.spectrum[0] / signature.spectrum.sum()),
        "update": float(signature.update[:, prefix:].square().mean()),
        "gate_nop": float(gates[nop].mean()),
        "gate_active": float(gates[active].mean()),
        "similarity_before": signature.similarity[0],
        "similarity_after": signature.similarity[1],
    }


@torch.no_grad()
def relative_error(task: Task, model: nn.Module, batch: TaskBatch) -> float:
    """Squared error relative to the squared update that the task requires.

    Relative to the squared target if the task requires no update.
    """
    scored = slice(task.num_unscored, None)
    error = (model(batch.inputs) - batch.targets)[:, scored].square().sum()
    scale = (batch.targets - batch.inputs)[:, scored].square().sum()
    if not scale:
        scale = batch.targets[:, scored].square().sum()
    return float(error / scale)


def event_rules(task: Task) -> Rules:
    """The event rules for samples of a task.

    The rule is `mean`, since half of the queries may need an update. It judges sequences as short
    as these, and local attention, in which a token sees only two keys.
    """
    rule = MeanRule(min_queries=min(task.length, MeanRule.min_queries), min_times_uniform=1.5)
    return Rules(causal=rule, bidirectional=rule)


def scan_task(task: Task, model: nn.Module, batch: TaskBatch) -> Scan:
    """`sinkwise.scan` of a model on a batch of its task."""
    return scan(model, [batch.inputs], rules=event_rules(task), layout=token_layout(task))


def token_layout(task: Task) -> Callable[[Any], TokenLayout]:
    """A function that names the tokens of a batch: registers, the null token, content."""

    def layout(inputs: Any) -> TokenLayout:
        kinds = ["register"] * task.num_registers + ["special"] * task.num_unscored
        kinds += ["text"] * (inputs.shape[1] - task.num_unscored)
        codes = torch.tensor([code(kind) for kind in kinds])
        return TokenLayout(codes.expand(len(inputs), -1))

    return layout
