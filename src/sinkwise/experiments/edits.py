"""Interventions on a sink's value: the task's error after the value was changed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from sinkwise.experiments.evaluation import relative_error
from sinkwise.synthetic.task import Task, TaskBatch

Edit = Literal["zero", "ordinary"]
"""Set the sink's value to zero, or replace it with the value of the token after it."""


@contextmanager
def edited_value(projection: nn.Module, sink: Int[Tensor, " batch"], edit: Edit) -> Iterator[None]:
    """Within this context the value of each sample's sink is edited."""

    def change(
        module: nn.Module, args: tuple[Any, ...], out: Float[Tensor, "batch token dim"]
    ) -> Tensor:
        out = out.clone()
        rows = torch.arange(len(out))
        other = out[rows, (sink + 1) % out.shape[1]]
        out[rows, sink] = torch.zeros_like(other) if edit == "zero" else other
        return out

    handle = projection.register_forward_hook(change)
    try:
        yield
    finally:
        handle.remove()


def error_after(
    task: Task, model: Any, batch: TaskBatch, sink: Int[Tensor, " batch"], layer: int, edit: Edit
) -> float:
    """Relative error of the task with the sink's value edited in one layer."""
    with edited_value(model.layers[layer].attention.v_proj, sink, edit):
        return relative_error(task, model, batch)
