"""The models of the authors' forms: learned positions, norms and, for broadcast, MLPs."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sinkwise.nn.gate import GateKind
from sinkwise.synthetic.model import Attention

POSITION_STD = 0.02
"""Standard deviation of learned positions at the start."""


def linear_std(dim: int) -> float:
    """The standard deviation that torch's own Linear layers of this width start with."""
    return (3 * dim) ** -0.5


class Positioned(nn.Module):
    """One attention layer of one head over x + positions.

    y = x + attention(x + positions); with `normed` y = h + attention(h), h = LayerNorm(x +
    positions). The positions are learned.
    """

    def __init__(
        self,
        dim: int,
        length: int,
        *,
        gate: GateKind | None = None,
        normed: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.attention = Attention(dim, gate=gate, std=linear_std(dim), generator=generator)
        self.positions = nn.Parameter(torch.empty(length, dim))
        nn.init.normal_(self.positions, std=POSITION_STD, generator=generator)
        self.norm = nn.LayerNorm(dim) if normed else None

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch token dim"]:
        read = x + self.positions
        if self.norm is None:
            return x + self.attention(read)
        read = self.norm(read)
        return read + self.attention(read)


class PreNormLayer(nn.Module):
    """x + attention(LayerNorm(x)), then x + MLP(LayerNorm(x)), four times as wide, with GELU."""

    def __init__(
        self, dim: int, *, gate: GateKind | None, generator: torch.Generator | None
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, gate=gate, std=linear_std(dim), generator=generator)
        wide, narrow = (
            nn.utils.skip_init(nn.Linear, *sizes) for sizes in ((dim, 4 * dim), (4 * dim, dim))
        )
        for linear in (wide, narrow):
            nn.init.normal_(linear.weight, std=linear_std(linear.in_features), generator=generator)
            nn.init.zeros_(linear.bias)
        self.mlp = nn.Sequential(wide, nn.GELU(), narrow)

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch token dim"]:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PreNorm(nn.Module):
    """A stack of pre-norm layers of one head each, without a final norm."""

    def __init__(
        self,
        dim: int,
        num_layers: int,
        *,
        gate: GateKind | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            PreNormLayer(dim, gate=gate, generator=generator) for _ in range(num_layers)
        )

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch token dim"]:
        for layer in self.layers:
            x = layer(x)
        return x
