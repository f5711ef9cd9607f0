"""A way of its own for what all tokens are told: a pooled update beside attention's."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from sinkwise.nn.gate import GateKind, OutputGate
from sinkwise.nn.linear import DeviceLike, linear
from sinkwise.nn.padding import check_real

PENALTY_WEIGHT = 0.1
"""The paper's factor on the common-mode fraction."""


class GlobalPathway(nn.Module):
    """sigmoid(W_g x_i + b) * g with g = sum_j pi_j W_V x_j and pi = softmax_j(w . x_j).

    The result is added to attention's update: heads then need no sink to tell everybody the same,
    and `common_mode_penalty` on attention's own update makes that cost something. x is the normed
    input of the block. Tokens that are not real (padding) are not pooled; a sample without any gets
    0. g is the same for all tokens, so this is no layer for a causal model: it looks ahead.

    The gate is per channel or, `headwise`, one factor a token. W_V ~ N(0, 0.02²), w = 0 (a mean
    over tokens) and the gate as `OutputGate` at the start, drawn from `generator`. State dict:
    `score.weight`, `v_proj.weight`, `gate.proj.weight`, `gate.proj.bias`.

    Raises InputError for another kind of gate, and where `real` is no bool [batch token].

    Reference: the revision of arXiv 2606.08105 (2026), as in its authors' code.
    """

    def __init__(
        self,
        dim: int,
        *,
        gate: GateKind = "elementwise",
        generator: torch.Generator | None = None,
        device: DeviceLike = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"generator": generator, "device": device, "dtype": dtype}
        self.score = linear(dim, 1, bias=False, std=0.0, **{**factory, "generator": None})
        self.v_proj = linear(dim, dim, bias=False, std=0.02, **factory)
        self.gate = OutputGate(dim, 1, kind=gate, **factory)

    def pool(
        self,
        x: Float[Tensor, "batch token dim"],
        real: Bool[Tensor, "batch token"] | None = None,
    ) -> Float[Tensor, "batch dim"]:
        """g: what every token is told, before its gate."""
        if real is not None:
            check_real(real, x)
            x = x.masked_fill(~real[..., None], 0.0)  # padding may hold NaN
        scores = self.score(x).squeeze(-1)
        if real is not None:
            scores = scores.masked_fill(~real, -torch.inf)
            # A sample of padding alone pools zeros, with finite scores.
            scores = scores.masked_fill(~real.any(-1, keepdim=True), 0.0)
        weights = torch.softmax(scores, dim=-1)
        # W_V after the sum: the same vector, for one product a sample instead of one a token.
        return self.v_proj(torch.einsum("bt,btd->bd", weights, x))

    def forward(
        self,
        x: Float[Tensor, "batch token dim"],
        real: Bool[Tensor, "batch token"] | None = None,
    ) -> Float[Tensor, "batch token dim"]:
        return self.gate(self.pool(x, real)[:, None].expand_as(x), x)


def common_mode_penalty(
    update: Float[Tensor, "batch token dim"],
    real: Bool[Tensor, "batch token"] | None = None,
    *,
    weight: float = PENALTY_WEIGHT,
) -> Float[Tensor, ""]:
    """weight * mean over samples of E(mean_i o_i) / E(o), E = mean squared entry; 0 to `weight`.

    o is attention's update, after its output projection. The fraction is 1 where every token gets
    the same and 1 / tokens for updates that have nothing in common. Tokens that are not `real` are
    left out; an update of zero, and a sample without a real token, has no common mode: 0. Add it to
    the loss, for each layer.

    Raises InputError where `real` is no bool [batch token].

    Reference: the revision of arXiv 2606.08105 (2026), as in its authors' code.
    """
    # The ratio does not depend on the scale; squares of half precision would overflow.
    update = update.to(torch.promote_types(update.dtype, torch.float32))
    if real is None:
        count = update.new_full((len(update), 1), update.shape[1])
    else:
        check_real(real, update)
        update = update.masked_fill(~real[..., None], 0.0)
        count = real.sum(-1, keepdim=True).clamp(min=1).to(update.dtype)
    common = (update.sum(1) / count).square().mean(-1)
    energy = (update.square().sum(1) / count).mean(-1)
    return weight * (common / energy.masked_fill(energy == 0, 1.0)).mean()
