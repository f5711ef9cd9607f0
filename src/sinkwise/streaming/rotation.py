"""The sinks of all layers, re-rotated together: a step pays for it once, not per layer."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from sinkwise.attention.rotary import Rotary
from sinkwise.streaming.layer import SinkLayer

BLOCK_BYTES = 2**22
"""Memory limit of the re-rotated sinks that are computed ahead for the next steps."""
MOST_SHIFTS = 64
"""Maximum number of steps that they are computed ahead for."""


@dataclass(eq=False)
class SinkRotation:
    """Layers on one device whose sinks rotate alike; valid as long as their buffers exist.

    Each step overwrites the sink rows by originals · cos δω + originals rotated by 90° · sin δω.
    """

    rotary: Rotary
    sinks: Float[Tensor, "layer batch kv_head key rotated"]
    """The original sink keys of all layers."""
    quarters: Float[Tensor, "layer batch kv_head key rotated"]
    """The same, every pair rotated by 90°."""
    targets: list[Tensor]
    """The rotated coordinates of the sink rows in each layer's buffer."""
    first: int = 0
    """The shift that `rotated` starts with."""
    rotated: list[tuple[Tensor, ...]] = field(default_factory=list)
    """The sinks of all layers for each of the next shifts, in the buffers' dtype."""

    @classmethod
    def of(cls, layers: Sequence[SinkLayer]) -> list["SinkRotation"]:
        """One for each kind of layer that re-rotates sinks; the layers' buffers must be full."""
        kinds: dict[tuple, list[SinkLayer]] = {}
        for layer in layers:
            if layer.rotary is not None and layer.retention.num_sink_tokens:
                assert layer.sinks is not None
                kind = layer.rotary, layer.sinks.shape, layer.sinks.dtype, layer.sinks.device
                kinds.setdefault(kind, []).append(layer)
        return [
            cls(
                rotary,
                torch.stack([layer.sinks for layer in alike]),  # type: ignore[misc]
                torch.stack([layer.quarters for layer in alike]),  # type: ignore[misc]
                [layer.sink_rows[..., rotary.coordinates] for layer in alike],
            )
            for (rotary, *_), alike in kinds.items()
        ]

    def write(self, shift: int) -> None:
        """Rotate all sinks by `shift` positions from their original ones."""
        if not 0 <= shift - self.first < len(self.rotated):
            self._rotate_ahead(shift)
        torch._foreach_copy_(self.targets, self.rotated[shift - self.first])

    def _rotate_ahead(self, first: int) -> None:
        """Compute the sinks for `first` and the next shifts."""
        dtype = self.targets[0].dtype
        count = BLOCK_BYTES // (self.sinks.numel() * dtype.itemsize)
        count = max(1, min(MOST_SHIFTS, count))
        angles = self.rotary.angles(torch.arange(first, first + count)[:, None, None, None, None])
        cos, sin = angles.cos().to(self.sinks), angles.sin().to(self.sinks)
        rotated = torch.addcmul(self.sinks * cos, self.quarters, sin).to(dtype)
        self.first, self.rotated = first, [layers.unbind(0) for layers in rotated.unbind(0)]
