"""The vocabulary of one attention call: its record, its mask, and the weights of its module."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionMask:
    """Which keys each query may see, and what is added to the scores.

    Key j is visible to query i if every field that is set allows it.
    """

    causal: bool = False
    """Query i sees key j only if j <= the position of i."""
    offset: int = 0
    """Position of query 0 among the keys: above 0 if a cache has earlier keys, even where the only
    query of a step sees all of them and the mask is open."""
    positions: Int[Tensor, " query"] | None = None
    """Position of each query among the keys, in ascending order; None: i + offset."""
    window: int | None = None
    """A query sees the `window` most recent keys, its own position included; needs `causal`."""
    allowed: Bool[Tensor, "#batch #head #query #key"] | None = None
    """True where the query may see the key."""
    additive: Float[Tensor, "#batch #head #query #key"] | None = None
    """Added to the scaled (and soft-capped) scores; -inf or the lowest value masks a key."""

    def __post_init__(self) -> None:
        if self.window is not None and (not self.causal or self.window < 1):
            raise ValueError(f"window={self.window} must be at least 1, with causal=True")

    def position_range(self, rows: range) -> tuple[int, int]:
        """The first and the last position of some consecutive queries."""
        if self.positions is None:
            return rows.start + self.offset, rows.stop - 1 + self.offset
        return int(self.positions[rows.start]), int(self.positions[rows.stop - 1])

    def positions_of(self, rows: range, device: torch.device) -> Int[Tensor, " row"]:
        """The positions of some consecutive queries."""
        if self.positions is None:
            return torch.arange(rows.start, rows.stop, device=device) + self.offset
        return self.positions[rows.start : rows.stop].to(device)

    @property
    def is_open(self) -> bool:
        """True if every query sees every key and nothing is added."""
        return not self.causal and self.allowed is None and self.additive is None


OPEN = AttentionMask()
"""Every query sees every key."""


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionSite:
    """The weights of one attention module per head, however the model stores them.

    For the (normed) input row x: q_h = x @ q[h].T, and the head's update before any gate is
    u = layer_scale * (o[h] @ (A v)). Query head h uses key/value head h // group.
    """

    name: str
    """Path of the module whose forward computes the attention."""
    q: Float[Tensor, "head head_dim dim"] | None
    k: Float[Tensor, "kv_head head_dim key_in"] | None
    v: Float[Tensor, "kv_head value_dim value_in"] | None
    o: Float[Tensor, "head out_dim value_dim"] | None
    layer_scale: Float[Tensor, " out_dim"] | None = None
    """The learned factor on the update, if any (LayerScale)."""
    input_gain: Float[Tensor, " dim"] | None = None
    """Gain of the norm before the projections, if any."""
    source: str = "layout"
    """`layout`: from a known layout of the weights; `jacobian`: measured."""


@dataclass(eq=False, kw_only=True)
class AttentionRecord:
    r"""One attention call; valid only while the callback that receives it runs.

    $$
    \mathrm{out} = \operatorname{softmax}(
    \mathrm{cap}(q k^\top \cdot \mathrm{scale}) + \mathrm{mask})\, v
    $$

    One row per query; a sink logit is one more column of the scores, without a value.
    """

    layer: int
    """Index of the block, counted over all blocks of the model that can contain attention."""
    name: str
    """Path of the module that called."""
    call: int = 0
    """Number of earlier calls of this module in this forward pass (layers may be shared)."""
    q: Float[Tensor, "batch head query head_dim"]
    """Queries as used in the scores: after rotary positions and norms."""
    k: Float[Tensor, "batch kv_head key head_dim"]
    v: Float[Tensor, "batch kv_head key value_dim"]
    out: Float[Tensor, "batch head query value_dim"]
    """A v per head, before the output projection and before any gate."""
    scale: float
    mask: AttentionMask = field(default=OPEN)
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap) before the mask."""
    sink_logit: Float[Tensor, "#batch head #query"] | None = None
    """A learned logit in the denominator of the softmax, without a value."""
    lse: Float[Tensor, "batch head query"] | None = None
    """Log-sum-exp of each query's scores, sink logit included; None if the kernel has none."""
    weights: Float[Tensor, "batch head query key"] | None = None
    """The attention map, if the model computes it anyway."""
    faithful: bool = True
    """False if q, k, scale and mask do not give the whole score; only `weights` is right then."""
    residual: Float[Tensor, "batch query dim"] | None = None
    """The input of the block, to which its update is added."""
    site: AttentionSite | None = None

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.q.shape[1] // self.k.shape[1]
