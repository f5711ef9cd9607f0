"""Linear layers whose weights come from a given generator, not from the global random state."""

import torch
from torch import nn

DeviceLike = torch.device | str | int | None
"""What torch's modules take as `device=`; None is torch's default device."""


def linear(
    inputs: int,
    outputs: int,
    *,
    bias: bool,
    std: float,
    generator: torch.Generator | None,
    device: DeviceLike,
    dtype: torch.dtype | None,
) -> nn.Linear:
    """A linear layer with weights from N(0, std²) and biases of 0, not initialized by torch."""
    device = torch.get_default_device() if device is None else device
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=bias, device=device, dtype=dtype)
    if std:
        nn.init.normal_(layer.weight, std=std, generator=generator)
    else:  # no draw: without a generator it would advance the global random state
        nn.init.zeros_(layer.weight)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer
