"""Linear layers that draw their weights from a given generator and leave the global one alone."""

import torch
from torch import nn

DeviceLike = torch.device | str | int | None


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
    """A linear layer with weights from N(0, std²) and biases of 0, without torch's own draws."""
    device = torch.get_default_device() if device is None else device
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=bias, device=device, dtype=dtype)
    if std:
        nn.init.normal_(layer.weight, std=std, generator=generator)
    else:  # no draw: without a generator it would advance the global random state
        nn.init.zeros_(layer.weight)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer
