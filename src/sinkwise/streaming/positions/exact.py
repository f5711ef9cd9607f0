"""Rotary angles in float64 for float64 models; transformers computes them in float32.

In float32 the model's own rotation has a rounding error, which limits every comparison. A float64
model is meant for closer comparisons, so its cosines and sines are recomputed in float64 during the
calls of a sink cache.
"""

from typing import Any

import torch
from torch import Tensor, nn

from sinkwise.errors import InputError
from sinkwise.streaming.positions.rotary import rotary_modules


def exact_rotary(base: nn.Module) -> list[Any]:
    """Hooks that recompute the output of every rotary module; remove them after the call."""
    return [
        module.register_forward_hook(_recompute, with_kwargs=True)
        for module in rotary_modules(base)
    ]


def _recompute(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    positions = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
    assert isinstance(positions, Tensor)
    cos, sin = output
    rounded = float((cos[0, 0, 0] ** 2 + sin[0, 0, 0] ** 2).sqrt())
    scales = [value for name, value in vars(module).items() if name.endswith("attention_scaling")]
    scale = min([1.0, *scales], key=lambda value: abs(value - rounded))
    scale = float(torch.tensor(scale, dtype=torch.float32))  # as the model applies it
    for name, buffer in module.named_buffers(recurse=False):
        if not name.endswith("inv_freq"):
            continue
        pairs = positions[..., None].double() * buffer.double()
        for angles in (pairs, torch.cat([pairs, pairs], -1), pairs.repeat_interleave(2, -1)):
            if angles.shape[-1] != cos.shape[-1]:
                continue
            made = angles.cos() * scale, angles.sin() * scale
            if (made[0] - cos).abs().max() < 1e-3 and (made[1] - sin).abs().max() < 1e-3:
                return made
    raise InputError(
        f"{type(module).__name__} computes cosines that its frequencies do not explain; use the "
        "model in float32"
    )
