"""The sinks of all layers, turned together: what a step of one token costs once, not a layer."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from sinkwise.attention.rotary import Rotary
from sinkwise.streaming.layer import SinkLayer

BLOCK_BYTES = 2**22
"""Turned sinks that are made at once, for the steps to come, take so much at most."""
MOST_SHIFTS = 64
"""Shifts that they are made for at once, at most."""


@dataclass(eq=False)
class Turning:
    """Layers whose sinks turn alike and lie on one device; it holds as long as their buffers do.

    Each step writes originals · cos δω + originals turned by 90° · sin δω over the sink rows.
    """

    rotary: Rotary
    sinks: Float[Tensor, "layer batch kv_head key rotated"]
    """The originals of all layers."""
    quarters: Float[Tensor, "layer batch kv_head key rotated"]
    """The same, every pair turned by 90°."""
    places: list[Tensor]
    """The sink rows in each layer's buffer, their rotated coordinates."""
    first: int = 0
    """The shift that `turned` starts with."""
    turned: list[tuple[Tensor, ...]] = field(default_factory=list)
    """The sinks of all layers for each of the next shifts, as the buffers have them."""

    @classmethod
    def of(cls, layers: Sequence[SinkLayer]) -> list["Turning"]:
        """One for each kind of layer among them that turns sinks; their buffers must be full."""
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
        """Turn all sinks by so many positions from where they came in."""
        if not 0 <= shift - self.first < len(self.turned):
            self._turn(shift)
        torch._foreach_copy_(self.places, self.turned[shift - self.first])

    def _turn(self, first: int) -> None:
        """Turn them for the shifts from `first` on."""
        dtype = self.places[0].dtype
        count = BLOCK_BYTES // (self.sinks.numel() * dtype.itemsize)
        count = max(1, min(MOST_SHIFTS, count))
        angles = self.rotary.angles(torch.arange(first, first + count)[:, None, None, None, None])
        cos, sin = angles.cos().to(self.sinks), angles.sin().to(self.sinks)
        turned = torch.addcmul(self.sinks * cos, self.quarters, sin).to(dtype)
        self.first, self.turned = first, [layers.unbind(0) for layers in turned.unbind(0)]
