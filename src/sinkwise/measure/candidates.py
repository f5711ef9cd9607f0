"""The keys of a call that can be sinks, from the attention that each key receives."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from sinkwise.attention.column import columns, visible_column
from sinkwise.attention.received import VisibilityCounts, received_mass
from sinkwise.attention.screen import Screen, screen
from sinkwise.attention.tiles import statistics_dtype
from sinkwise.core.records import AttentionMask, AttentionRecord
from sinkwise.diagnosis.rules import EventRule
from sinkwise.measure.visibility import same_mask

MAX_SCREENING_COST = 0.5
"""Share of the scores above which screening a call does not pay."""


@dataclass(frozen=True, eq=False)
class ReceivedAttention:
    """The attention that every key of a call receives: exact, or estimated by screening."""

    mass: Float[Tensor, "batch head key"]
    """Sum of the attention to the key over all real queries."""
    bound: Float[Tensor, "batch head key"]
    """Mean over the real queries that see the key; if screened, an upper bound on it."""
    counts: VisibilityCounts
    lse: Float[Tensor, "batch head query"] | None
    """Log-sum-exp of each query's scores; None where the record has the map itself."""
    screened: bool


class Keys(NamedTuple):
    """Some keys of a call, each for one head and sample."""

    batch: Int[Tensor, " event"]
    """Row of the record's batch."""
    head: Int[Tensor, " event"]
    key: Int[Tensor, " event"]

    def only(self, chosen: Bool[Tensor, " event"]) -> "Keys":
        """The chosen ones among them."""
        return Keys(*(index[chosen] for index in self))

    def of(self, values: Shaped[Tensor, "#batch head_or_one key"]) -> Shaped[Tensor, " event"]:
        """The value of each of these keys; one head's values may stand for all heads."""
        head = self.head.clamp(max=values.shape[1] - 1)
        return values[self.batch, head, self.key]


def received_exactly(
    record: AttentionRecord,
    real_queries: Bool[Tensor, "batch query"] | None,
    counts: VisibilityCounts,
) -> ReceivedAttention:
    """Received attention over all real queries, from the map where the record has it."""
    lse = record.lse
    if record.weights is not None:
        weights = record.weights.to(statistics_dtype(record.q))
        if real_queries is not None:
            weights = weights.masked_fill(~real_queries[:, None, :, None], 0.0)
        mass = weights.sum(dim=-2)
    else:
        mass, lse = received_mass(
            record.q,
            record.k,
            scale=record.scale,
            mask=record.mask,
            softcap=record.softcap,
            sink_logit=record.sink_logit,
            lse=lse,
            counted=real_queries,
        )
    count, uniform = counts.count.to(mass.dtype), counts.uniform.to(mass.dtype)
    mean = mass / count.masked_fill(count == 0, torch.nan)
    return ReceivedAttention(mass, mean, VisibilityCounts(count, uniform), lse, screened=False)


def received_screened(
    record: AttentionRecord, counts: VisibilityCounts, settings: Screen, call_seed: int
) -> ReceivedAttention | None:
    """Received attention estimated from some of the queries.

    None where that is not possible (padding, windows and other masks, no log-sum-exp) or not worth
    it (short calls).
    """
    mask = record.mask
    square = record.q.shape[2] == record.k.shape[2] or not mask.causal
    plain = square and same_mask(mask, AttentionMask(causal=mask.causal))
    if not plain or record.lse is None or record.weights is not None:
        return None
    sample = settings.sample(record.q.shape[2], mask.causal, call_seed)
    if sample.cost > MAX_SCREENING_COST:
        return None
    estimate = screen(
        record.q,
        record.k,
        record.lse,
        sample,
        scale=record.scale,
        miss=settings.miss,
        softcap=record.softcap,
    )
    bound = estimate.received + estimate.margin
    return ReceivedAttention(estimate.mass, bound, counts, record.lse, screened=True)


def candidates(
    attention: ReceivedAttention,
    rule: EventRule,
    num_queries: Float[Tensor, "batch 1 1"],
    readable: Bool[Tensor, "batch head"],
    real_keys: Bool[Tensor, "batch key"] | None,
) -> Keys:
    """Keys that can meet the rule: no padding, and in a head without NaN or Inf."""
    counts = attention.counts
    possible = rule.candidates(attention.bound, counts.count, counts.uniform, num_queries)
    possible &= readable[..., None]
    if real_keys is not None:
        possible &= real_keys[:, None, :]
    return Keys(*possible.nonzero(as_tuple=True))


def attention_to(
    record: AttentionRecord, keys: Keys, lse: Float[Tensor, "batch head query"] | None
) -> Float[Tensor, "event query"]:
    """The attention that every query gives to each key: a column of the map."""
    if record.weights is not None:
        return record.weights[keys.batch, keys.head, :, keys.key].to(statistics_dtype(record.q))
    assert lse is not None
    return columns(
        record.q,
        record.k,
        lse,
        scale=record.scale,
        mask=record.mask,
        softcap=record.softcap,
        batch=keys.batch,
        head=keys.head,
        key=keys.key,
    )


def judged_queries(
    record: AttentionRecord, keys: Keys, real_queries: Bool[Tensor, "batch query"] | None
) -> Bool[Tensor, "event query"]:
    """The queries by which each key is judged: those that see it and are no padding."""
    visible = visible_column(record.mask, keys.batch, keys.head, keys.key, record.q.shape[2])
    return visible if real_queries is None else visible & real_queries[keys.batch]


def received_by_candidates(
    record: AttentionRecord,
    attention: ReceivedAttention,
    keys: Keys,
    weights: Float[Tensor, "event query"],
) -> Float[Tensor, "batch head key"]:
    """Exact received attention of a screening's candidates and of the first key; NaN elsewhere."""
    count = attention.counts.count[0, 0].to(weights.dtype)
    shape = record.q.shape[:2]
    received = weights.new_full((*shape, record.k.shape[2]), torch.nan)
    received[keys] = weights.sum(dim=-1) / count[keys.key]
    batch, head = torch.ones(shape, device=record.q.device).nonzero(as_tuple=True)
    first = attention_to(record, Keys(batch, head, torch.zeros_like(head)), attention.lse)
    received[:, :, 0] = first.sum(dim=-1).reshape(shape) / count[0]
    return received
