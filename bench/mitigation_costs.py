"""What each mitigation costs: parameters, arithmetic and time of a training step."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

HEADINGS = ("mitigation", "parameters", "FLOPs of a step", "time of a step")

Step = Callable[[], Tensor]
"""Computes the loss of one step."""


def costs(
    models: Mapping[str, nn.Module], steps: Mapping[str, Step], rounds: int
) -> list[list[str]]:
    """A row a model: what it has and needs more than the first one, in percent; the time of a
    forward and a backward pass beside the first one's, the median of the ratios over `rounds`
    rounds in which all take turns, every second one backwards.
    """
    first = next(iter(models))
    sizes = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    flops = {name: step_flops(models[name], steps[name]) for name in models}
    taken = times(models, steps, rounds)
    rows = []
    for name in models:
        ratio = statistics.median(
            one / other for one, other in zip(taken[name], taken[first], strict=True)
        )
        cells = [f"+{sizes[name] / sizes[first] - 1:.2%}", f"+{flops[name] / flops[first] - 1:.2%}"]
        if name == first:
            milliseconds = 1e3 * statistics.median(taken[first])
            cells = [f"{sizes[first]:,}", f"{flops[first] / 1e9:.2f} G"]
            rows.append([name, *cells, f"{milliseconds:.0f} ms"])
        else:
            rows.append([name, *cells, f"{ratio:.2f} x"])
    return rows


def times(
    models: Mapping[str, nn.Module], steps: Mapping[str, Step], rounds: int
) -> dict[str, list[float]]:
    """Seconds of a step of each model, a round each; on one thread the process's own time."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    taken: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(rounds + 1):
        for name in models if turn % 2 else reversed(list(models)):
            models[name].zero_grad(set_to_none=True)
            start = clock()
            steps[name]().backward()
            if turn:  # the first round warms up
                taken[name].append(clock() - start)
    return taken


def step_flops(model: nn.Module, step: Step) -> int:
    """Floating-point operations of a forward and a backward pass, counted in their products."""
    model.zero_grad(set_to_none=True)
    with FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION) as counter:
        step().backward()
    return counter.get_total_flops()


def _forward(q: Any, k: Any, v: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return sdpa_flop_count(q, k, v)


def _backward(
    grad: Any, q: Any, k: Any, v: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    return sdpa_backward_flop_count(grad, q, k, v)


_CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
}
"""torch counts the kernels of GPUs; the same formulas for that of the CPU."""
