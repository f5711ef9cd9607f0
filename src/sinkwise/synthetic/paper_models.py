"""The models of the authors' forms: with learned positions, norms and, for broadcast, MLPs."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sinkwise.nn.gate import GateKind
from sinkwise.nn.linear import linear
from sinkwise.synthetic.model import Attention

POSITION_STD = 0.02
"""Standard deviation of the initial learned positions."""


def linear_std(dim: int) -> float:
    """The standard deviation of the initial weights in torch's own Linear layers of this width."""
    return (3 * dim) ** -0.5


class PositionalAttention(nn.Module):
    r"""One attention layer of one head with learned positions $P$.

    $y = x + \text{attention}(x + P)$; with `normed`, $y = h + \text{attention}(h)$ where
    $h = \text{LayerNorm}(x + P)$.
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
        positioned = x + self.positions
        if self.norm is None:
            return x + self.attention(positioned)
        normed = self.norm(positioned)
        return normed + self.attention(normed)


class PreNormBlock(nn.Module):
    """x + attention(LayerNorm(x)), then x + MLP(LayerNorm(x)), with GELU and 4 × dim channels."""

    def __init__(
        self, dim: int, *, gate: GateKind | None, generator: torch.Generator | None
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, gate=gate, std=linear_std(dim), generator=generator)
        wide, narrow = (
            linear(
                inputs,
                outputs,
                bias=True,
                std=linear_std(inputs),
                generator=generator,
                device=None,
                dtype=None,
            )
            for inputs, outputs in ((dim, 4 * dim), (4 * dim, dim))
        )
        self.mlp = nn.Sequential(wide, nn.GELU(), narrow)

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch token dim"]:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PreNormTransformer(nn.Module):
    """A stack of pre-norm blocks of one head each, without a final norm."""

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
            PreNormBlock(dim, gate=gate, generator=generator) for _ in range(num_layers)
        )

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch token dim"]:
        for layer in self.layers:
            x = layer(x)
        return x
