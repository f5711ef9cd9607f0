"""The output gate: scales what a head computed, per query."""

from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sinkwise.errors import InputError
from sinkwise.nn.linear import DeviceLike, linear

GateKind = Literal["elementwise", "headwise"]

PAPER_VARIANCE = 1e-6
"""Initial variance of W_g."""
PAPER_BIAS = 2.0
"""Initial b: sigmoid(2) = 0.88, nearly open."""


class OutputGate(nn.Module):
    r"""A sigmoid gate after the weighted sum of the values, before W_O.

    $$
    \mathrm{heads} \odot \sigma(W_g x + b)
    $$

    $x$ is the input of the attention layer, after the block's norm. `elementwise` has one factor
    per channel of the heads' outputs, `headwise` one per head; all are in $(0, 1)$. A head with
    nothing to add can close its gate instead of attending to a token without a value. The gate
    starts with $W_g \sim N(0, 10^{-6})$, drawn from `generator`, and $b = 2$.

    Raises InputError for an unknown `kind`, and if `dim` is not a multiple of `num_heads`.

    Reference: Qiu et al., 2025, arXiv 2505.06708 (position G1).
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        in_dim: int | None = None,
        kind: GateKind = "elementwise",
        generator: torch.Generator | None = None,
        device: DeviceLike = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`dim` is the number of channels of all heads; `in_dim` that of x, if it differs.

        `device` and `dtype` as in torch's modules; `generator` must be on that device.
        """
        super().__init__()
        if kind not in get_args(GateKind):
            raise InputError(f"kind={kind!r} must be one of {', '.join(get_args(GateKind))}")
        if num_heads < 1 or dim % num_heads:
            raise InputError(f"dim={dim} must be a multiple of num_heads={num_heads}")
        self.kind = kind
        self.num_heads = num_heads
        outputs = dim if kind == "elementwise" else num_heads
        self.proj = linear(
            dim if in_dim is None else in_dim,
            outputs,
            bias=True,
            std=PAPER_VARIANCE**0.5,
            generator=generator,
            device=device,
            dtype=dtype,
        )
        nn.init.constant_(self.proj.bias, PAPER_BIAS)

    def factor(self, x: Float[Tensor, "*batch in_dim"]) -> Float[Tensor, "*batch factor"]:
        r"""$\sigma(W_g x + b)$, each in $(0, 1)$."""
        return torch.sigmoid(self.proj(x))

    def forward(
        self, heads: Float[Tensor, "*batch dim"], x: Float[Tensor, "*batch in_dim"]
    ) -> Float[Tensor, "*batch dim"]:
        factor = self.factor(x)
        if self.kind == "elementwise":
            return heads * factor
        return (heads.unflatten(-1, (self.num_heads, -1)) * factor[..., None]).flatten(-2)
