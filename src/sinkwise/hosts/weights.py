"""A checksum of a model's weights."""

from collections.abc import Iterator

import torch
from torch import nn

from sinkwise.data.batch import tensor_bits
from sinkwise.storage.checksums import checksum

SAMPLED = 64
"""Values of each tensor that enter the checksum one by one; their sum is over all values."""


def weights_checksum(model: nn.Module) -> str:
    """Checksum of all parameters and buffers: of each its name, shape and dtype, the exact sum of
    its bits as integers (independent of the order of addition), and some of its values.
    """
    return checksum(_weights(model))


@torch.no_grad()
def _weights(model: nn.Module) -> Iterator[bytes | str]:
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        yield f"{name} {tuple(value.shape)} {value.dtype}"
        bits = tensor_bits(value)
        if bits is not None and bits.numel():
            step = max(1, bits.numel() // SAMPLED)
            yield bits[::step].cpu().to(torch.int64).numpy().tobytes()
            yield str(int(bits.sum(dtype=torch.int64)))
