"""A separate path for information that every token receives: a pooled update beside attention's."""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from sinkwise.nn.gate import GateKind, OutputGate
from sinkwise.nn.linear import DeviceLike, linear
from sinkwise.nn.padding import check_real

PENALTY_WEIGHT = 0.1
"""The paper's factor on the common-mode share."""


class GlobalPathway(nn.Module):
    r"""A pooled update for every token, with a gate per token.

    $$
    \sigma(W_g x_i + b) \odot g,\qquad
    g = \sum_j \pi_j W_V x_j,\qquad
    \pi = \operatorname{softmax}_j(w^\top x_j)
    $$

    Add the result to attention's update: heads then need no sink to send the same information to
    every token, and `common_mode_penalty` on attention's own update discourages them from doing so.
    $x$ is the block's normed input. Padding (`real` is False) is not pooled; a sample of padding
    alone gets 0. $g$ depends on all tokens, later ones included: do not use it in causal models.

    The gate has one factor per channel or, if `headwise`, one per token. At the start
    $W_V \sim N(0, 0.02^2)$, $w = 0$ (a mean over tokens), and the gate is as in `OutputGate`, drawn
    from `generator`. State dict: `score.weight`, `v_proj.weight`, `gate.proj.weight`,
    `gate.proj.bias`.

    Raises InputError for an unknown gate, and if `real` is not bool [batch token].

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
        """`device` and `dtype` as in torch's modules; `generator` must be on that device."""
        super().__init__()
        factory: dict[str, Any] = {"generator": generator, "device": device, "dtype": dtype}
        self.score = linear(dim, 1, bias=False, std=0.0, **factory)
        self.v_proj = linear(dim, dim, bias=False, std=0.02, **factory)
        self.gate = OutputGate(dim, 1, kind=gate, **factory)

    def pool(
        self,
        x: Float[Tensor, "batch token dim"],
        real: Bool[Tensor, "batch token"] | None = None,
    ) -> Float[Tensor, "batch dim"]:
        """$g$: the pooled update before the gate, the same for every token."""
        if real is not None:
            check_real(real, x)
            x = x.masked_fill(~real[..., None], 0.0)  # padding may hold NaN
        scores = self.score(x).squeeze(-1)
        if real is not None:
            scores = scores.masked_fill(~real, -torch.inf)
            # A sample of padding alone pools zeros: its scores must be finite.
            scores = scores.masked_fill(~real.any(-1, keepdim=True), 0.0)
        weights = torch.softmax(scores, dim=-1)
        # W_V after the sum: the same result, with one product per sample instead of one per token.
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
    r"""The share of an update that all tokens have in common, times `weight`; 0 to `weight`.

    $$
    \mathrm{weight} \cdot \operatorname{mean}_{\mathrm{samples}}
    \frac{E(\operatorname{mean}_i o_i)}{E(o)},\qquad
    E(o) = \text{mean squared entry}
    $$

    $o$ is attention's update, after its output projection. The share is 1 if every token gets the
    same, and 1 / tokens for updates that have nothing in common. Padding (`real` is False) is left
    out; an update of zero, and a sample of padding alone, has no common mode: 0. Add the penalty to
    the loss, once per layer.

    Raises InputError if `real` is not bool [batch token].

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
