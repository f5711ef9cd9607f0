"""The statistics of each sink: one small function per column of the events frame.

To add a statistic, write a function from `Sinks` to one value per sink and give it a row in
`SINK_FIELDS`. What several statistics need is computed once, as a property of `Sinks`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkwise.attention.rank import UpdateSpectrum, update_spectrum
from sinkwise.attention.tiles import statistics_dtype
from sinkwise.core.records import AttentionRecord
from sinkwise.diagnosis.rules import RelaxedRule
from sinkwise.measure.call_tokens import CallTokens
from sinkwise.measure.candidates import Keys
from sinkwise.measure.residual import ResidualStatistics

ROUTED_ATTENTION = RelaxedRule.attention
"""A query routes to a sink to which it gives at least this much attention."""


@dataclass(frozen=True, eq=False)
class Sinks:
    """The sinks of one call, with everything that their statistics are computed from."""

    record: AttentionRecord
    tokens: CallTokens
    keys: Keys
    weights: Float[Tensor, "event query"]
    """The attention that each query gives to the sink: its column of the map."""
    judged: Bool[Tensor, "event query"]
    """Queries that see the sink and are no padding."""
    received: Float[Tensor, " event"]
    """Mean of `weights` over the judged queries."""
    uniform: Float[Tensor, " event"]
    """What uniform attention under the same mask would give the sink."""
    root: Float[Tensor, "head value_dim value_dim"] | None
    """R with |R v| = |layer_scale * W_O v|; None where W_O is not known."""
    residual: ResidualStatistics | None
    """Statistics of the block's input, if known."""

    @cached_property
    def dtype(self) -> torch.dtype:
        """At least float32."""
        return statistics_dtype(self.record.q)

    @cached_property
    def _pairs(self) -> tuple[Tensor, Tensor]:
        pairs = torch.stack([self.keys.batch, self.keys.head])
        return torch.unique(pairs, dim=1, return_inverse=True)

    @property
    def heads(self) -> tuple[Int[Tensor, " pair"], Int[Tensor, " pair"]]:
        """(row of the batch, head) of each head with a sink; a head with several counts once."""
        batch, head = self._pairs[0]
        return batch, head

    @property
    def head_of_sink(self) -> Int[Tensor, " event"]:
        """Index into `heads` of each sink."""
        return self._pairs[1]

    @cached_property
    def value(self) -> Float[Tensor, "pair key value_dim"]:
        """v of every key, for each head with a sink."""
        batch, head = self.heads
        return self.record.v[batch, head // self.record.group].to(self.dtype)

    @cached_property
    def update(self) -> UpdateSpectrum:
        """Spectrum of the update U = A v W_O^T of each head with a sink; of A v without W_O."""
        batch, head = self.heads
        root = self.root
        if root is None:
            width = self.record.v.shape[-1]
            root = torch.eye(width, dtype=self.dtype, device=self.record.v.device)
            root = root.expand(self.record.q.shape[1], -1, -1)
        real = None if self.tokens.real_queries is None else self.tokens.real_queries[batch]
        return update_spectrum(self.record.out[batch, head], root[head], real)

    def unknown(self) -> Float[Tensor, " event"]:
        """NaN for every sink."""
        return torch.full_like(self.keys.key, torch.nan, dtype=self.dtype)


def received(sinks: Sinks) -> Float[Tensor, " event"]:
    """Mean attention of the queries that see the sink, 0 to 1."""
    return sinks.received


def received_excess(sinks: Sinks) -> Float[Tensor, " event"]:
    """Received attention minus that of uniform attention under the same mask, -1 to 1."""
    return sinks.received - sinks.uniform


def routed_share(sinks: Sinks) -> Float[Tensor, " event"]:
    """Share of the queries that give the sink at least half of their attention, 0 to 1."""
    routed = (sinks.weights >= ROUTED_ATTENTION) & sinks.judged
    return routed.sum(dim=-1) / sinks.judged.sum(dim=-1)


def min_attention(sinks: Sinks) -> Float[Tensor, " event"]:
    """The least attention that any query which sees the sink gives it, 0 to 1."""
    return sinks.weights.masked_fill(~sinks.judged, torch.inf).amin(dim=-1)


def value_ratio(sinks: Sinks) -> Float[Tensor, " event"]:
    """|W_O v_s| over the mean of the other tokens' |W_O v_j|, 0 or more; NaN without W_O."""
    if sinks.root is None:
        return sinks.unknown()
    root = sinks.root[sinks.heads[1]].to(sinks.dtype)
    return _norm_ratio(sinks, torch.linalg.vector_norm(sinks.value @ root.mT, dim=-1))


def value_ratio_raw(sinks: Sinks) -> Float[Tensor, " event"]:
    """|v_s| over the mean of the other tokens' |v_j|, 0 or more."""
    return _norm_ratio(sinks, torch.linalg.vector_norm(sinks.value, dim=-1))


def stable_rank(sinks: Sinks) -> Float[Tensor, " event"]:
    """|U|_F^2 / sigma_1^2 of the head's update, 1 or more; 1: every token gets the same vector."""
    return sinks.update.stable_rank[sinks.head_of_sink]


def rank_one_energy(sinks: Sinks) -> Float[Tensor, " event"]:
    """sigma_1^2 / |U|_F^2 of the head's update, 0 to 1."""
    return sinks.update.rank_one_energy[sinks.head_of_sink]


def update_norm(sinks: Sinks) -> Float[Tensor, " event"]:
    """Root mean square over the queries of the norm of the head's update."""
    number: float | Tensor = float(sinks.record.q.shape[2])
    if sinks.tokens.real_queries is not None:
        number = sinks.tokens.real_queries[sinks.heads[0]].sum(dim=-1).to(sinks.dtype)
    return (sinks.update.energy / number).sqrt()[sinks.head_of_sink]


def token_norm_ratio(sinks: Sinks) -> Float[Tensor, " event"]:
    """Norm of the sink in the residual stream over the sample's median token norm; NaN where the
    residual stream is not known.
    """
    batch, _, key = sinks.keys
    residual, v = sinks.residual, sinks.record.v
    if residual is None or residual.norm.shape != (v.shape[0], v.shape[2]):
        return sinks.unknown()
    return residual.norm[batch, key] / residual.median[batch]


SINK_FIELDS: dict[str, Callable[[Sinks], Float[Tensor, " event"]]] = {
    "received": received,
    "received_excess": received_excess,
    "routed_share": routed_share,
    "min_attention": min_attention,
    "value_ratio": value_ratio,
    "value_ratio_raw": value_ratio_raw,
    "stable_rank": stable_rank,
    "rank_one_energy": rank_one_energy,
    "update_norm": update_norm,
    "token_norm_ratio": token_norm_ratio,
}
"""The statistics of a sink, in the order of their columns in the events frame."""


def _norm_ratio(sinks: Sinks, norms: Float[Tensor, "pair key"]) -> Float[Tensor, " event"]:
    """Norm of the sink's vector over the mean norm of the other real tokens; NaN without others."""
    norms = norms.double()  # beside a large own norm the others' would be rounded away
    if sinks.tokens.real_keys is not None:
        real = sinks.tokens.real_keys[sinks.heads[0]]
        norms = norms.masked_fill(~real, 0.0)
        number = real.sum(dim=-1).to(norms.dtype)
    else:
        number = torch.full_like(norms[:, 0], float(norms.shape[1]))
    pair = sinks.head_of_sink
    own = norms[pair, sinks.keys.key]
    others = (norms.sum(dim=-1)[pair] - own) / (number[pair] - 1)
    return (own / others).to(sinks.dtype)
