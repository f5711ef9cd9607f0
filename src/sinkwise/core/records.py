"""The vocabulary of one attention call: its record, its mask, and the site it lives at."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionMask:
    """Which keys a query may see, and what is added to its scores.

    Every part that is set restricts further: key j is visible to query i when all agree.
    """

    causal: bool = False
    """Query i sees key j when j <= its position."""
    offset: int = 0
    """Position of query 0 among the keys: above 0 when a cache holds earlier keys, also where a
    step's one query sees them all and the mask is open."""
    positions: Int[Tensor, " query"] | None = None
    """Position of each query among the keys, ascending; i + offset where not given."""
    window: int | None = None
    """A query sees the `window` most recent keys, its own position included; needs `causal`."""
    allowed: Bool[Tensor, "#batch #head #query #key"] | None = None
    """True where the key may be seen."""
    additive: Float[Tensor, "#batch #head #query #key"] | None = None
    """Added to the scaled (and soft-capped) scores; a key is hidden at -inf or the lowest value."""

    def __post_init__(self) -> None:
        if self.window is not None and (not self.causal or self.window < 1):
            raise ValueError(f"window={self.window} needs causal=True and a value of at least 1")

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
        """True when every query sees every key with nothing added."""
        return not self.causal and self.allowed is None and self.additive is None


OPEN = AttentionMask()
"""Every query sees every key."""


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionSite:
    """The weights of one attention layer, a head at a time, whatever way the model stores them.

    With x the layer's (normed) input as a row: q_h = x @ q[h].T, and the head's update before any
    gate is u = layer_scale * (o[h] @ (A v)). Query head h reads key/value head h // group.
    """

    name: str
    """Path of the module whose forward computes the attention."""
    q: Float[Tensor, "head head_dim dim"] | None
    k: Float[Tensor, "kv_head head_dim key_in"] | None
    v: Float[Tensor, "kv_head value_dim value_in"] | None
    o: Float[Tensor, "head out_dim value_dim"] | None
    layer_scale: Float[Tensor, " out_dim"] | None = None
    """The learned factor on the layer's update, if any (LayerScale)."""
    input_gain: Float[Tensor, " dim"] | None = None
    """Gain of the norm before the projections, if any."""
    source: str = "layout"
    """`layout` where a known layout named the weights, `jacobian` where they were measured."""


@dataclass(eq=False, kw_only=True)
class AttentionRecord:
    """One attention call, alive only while the callback that receives it runs.

    out = softmax(softcap(q k^T * scale) + mask | sink_logit) v, row = query.
    """

    layer: int
    """Index of the block, counted over all blocks of the model that can hold attention."""
    name: str
    """Path of the module that called."""
    call: int = 0
    """How often this module had called before in this forward pass (layers may be shared)."""
    q: Float[Tensor, "batch head query head_dim"]
    """Queries as used: after rotary positions and norms."""
    k: Float[Tensor, "batch kv_head key head_dim"]
    v: Float[Tensor, "batch kv_head key value_dim"]
    out: Float[Tensor, "batch head query value_dim"]
    """A v, a head at a time, before the output projection and before any gate."""
    scale: float
    mask: AttentionMask = field(default=OPEN)
    softcap: float | None = None
    """Scores pass through softcap * tanh(score / softcap) before the mask."""
    sink_logit: Float[Tensor, "#batch head #query"] | None = None
    """A learned logit that joins the softmax's denominator and carries no value."""
    lse: Float[Tensor, "batch head query"] | None = None
    """Log-sum-exp of each query's scores, sink logit included; None where the kernel kept it."""
    weights: Float[Tensor, "batch head query key"] | None = None
    """The map itself, where the model built it anyway."""
    faithful: bool = True
    """False where q, k, scale and mask do not tell the whole score (only `weights` does)."""
    gate: Float[Tensor, "..."] | None = None
    residual: Float[Tensor, "batch query dim"] | None = None
    """The block's input, to which the update is added."""
    site: AttentionSite | None = None

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.q.shape[1] // self.k.shape[1]
