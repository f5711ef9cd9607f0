"""What a sink's value is good for: the task's error after it was changed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from sinkwise.experiments.running import relative_error
from sinkwise.synthetic.task import Sample, Task

Edit = Literal["zero", "ordinary"]


@contextmanager
def edited_value(projection: nn.Module, sink: Int[Tensor, " batch"], edit: Edit) -> Iterator[None]:
    """Inside, the value of each sample's sink is 0, or that of the token after it."""

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
    task: Task, model: Any, sample: Sample, sink: Int[Tensor, " batch"], layer: int, edit: Edit
) -> float:
    """Relative error of the task with the sink's value edited in one layer."""
    with edited_value(model.layers[layer].attention.v_proj, sink, edit):
        return relative_error(task, model, sample)
