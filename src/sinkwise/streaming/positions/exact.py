"""Rotary angles in float64, for models in float64: transformers builds them in float32.

In float32 a model's own rotation is off by its own rounding, and distances hold to that. A float64
model is used to look closer, so for the calls of a sink cache its cosines and sines are rebuilt.
"""

from typing import Any

import torch
from torch import Tensor, nn

from sinkwise.errors import InputError
from sinkwise.streaming.positions.rotary import rotary_modules


def exact_rotary(base: nn.Module) -> list[Any]:
    """Hooks that rebuild the output of every rotary module; remove them after the call."""
    return [
        module.register_forward_hook(_rebuild, with_kwargs=True) for module in rotary_modules(base)
    ]


def _rebuild(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    positions = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
    assert isinstance(positions, Tensor)
    cos, sin = output
    rounded = float((cos[0, 0, 0] ** 2 + sin[0, 0, 0] ** 2).sqrt())
    scales = [value for name, value in vars(module).items() if name.endswith("attention_scaling")]
    scale = min([1.0, *scales], key=lambda value: abs(value - rounded))
    scale = float(torch.tensor(scale, dtype=torch.float32))  # as the model multiplies it
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
        f"{type(module).__name__} makes cosines that its frequencies do not explain: use the model "
        "in float32"
    )
