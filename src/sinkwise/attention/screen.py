"""Screening: which keys can be sinks at all, estimated from a sample of the queries."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkwise.attention.tiles import score_tiles, statistics_dtype
from sinkwise.core.records import OPEN, AttentionMask


@dataclass(frozen=True)
class Screen:
    """How many queries are sampled, and the probability of missing a sink."""

    rows: int = 192
    """Queries sampled in bidirectional attention."""
    stratum_rows: int = 64
    """Queries sampled per stratum of causal attention; twice as many in the last stratum."""
    miss: float = 1e-6
    """Upper bound on the probability that a given sink is missed (Hoeffding's inequality)."""
    seed: int = 0
    """Seed of the sample; each attention call draws its own."""

    def strata(self, queries: int, causal: bool) -> list[range]:
        """Bidirectional: one stratum. Causal: the end of the sequence, then strata of doubling
        length towards its start, because the later a key is, the fewer queries see it.
        """
        if not causal:
            return [range(queries)]
        strata = []
        stop, length = queries, 2 * self.stratum_rows
        while stop > 0:
            strata.append(range(max(0, stop - length), stop))
            stop = strata[-1].start
            length = queries - stop
        return strata

    def sample(self, queries: int, causal: bool, call_seed: int = 0) -> "QuerySample":
        """The whole last stratum, and a random sample of every other one."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + call_seed)
        strata = self.strata(queries, causal)
        rows = []
        for stratum in strata:
            wanted = self.rows if not causal else self.stratum_rows * (1 + (stratum is strata[0]))
            chosen = torch.randperm(len(stratum), generator=generator)[:wanted].sort().values
            rows.append(chosen + stratum.start)
        return QuerySample(causal, queries, strata, rows)


@dataclass(frozen=True, eq=False)
class QuerySample:
    """The queries from which received attention is estimated."""

    causal: bool
    queries: int
    strata: list[range]
    rows: list[Int[Tensor, " _"]]
    """Positions of the sampled queries of each stratum."""

    @property
    def cost(self) -> float:
        """Scores computed, as a share of all visible ones."""
        if not self.causal:
            return len(self.rows[0]) / self.queries
        pairs = zip(self.rows, self.strata, strict=True)
        computed = sum(len(rows) * stratum.stop for rows, stratum in pairs)
        return computed / (self.queries * (self.queries + 1) / 2)

    def visibility_counts(self, index: int, keys: int) -> tuple[Tensor, Tensor]:
        """For each key, how many queries of a stratum see it, and how many of those are sampled."""
        stratum, rows = self.strata[index], self.rows[index]
        if not self.causal:
            return torch.full((keys,), len(stratum)), torch.full((keys,), len(rows))
        key = torch.arange(keys)
        count = (stratum.stop - key.clamp(min=stratum.start)).clamp(min=0)
        return count, len(rows) - torch.searchsorted(rows, key)

    def all_visibility_counts(self, keys: int) -> tuple[Tensor, Tensor]:
        """`visibility_counts` of every stratum: two tensors [stratum key]."""
        counts = [self.visibility_counts(index, keys) for index in range(len(self.rows))]
        visible, sampled = zip(*counts, strict=True)
        return torch.stack(visible), torch.stack(sampled)


class Screened(NamedTuple):
    """Received attention of every key, estimated from a sample of the queries."""

    received: Float[Tensor, "batch head key"]
    """Estimated received attention; queries of a stratum without a sample count as 1."""
    mass: Float[Tensor, "batch head key"]
    """Estimated sum of A_ij over all queries i, without those of strata that have no sample."""
    margin: Float[Tensor, " key"]
    """A key whose estimate lies below a threshold by more than this reaches the threshold with a
    probability of at most `miss`; 0 where every query that sees the key was sampled.
    """


def screen(
    q: Float[Tensor, "batch head query head_dim"],
    k: Float[Tensor, "batch kv_head key head_dim"],
    lse: Float[Tensor, "batch head query"],
    sample: QuerySample,
    *,
    scale: float,
    miss: float,
    softcap: float | None = None,
) -> Screened:
    """Estimate every key's received attention from the sampled queries.

    Let V_s queries of stratum s see the key, V in all, and n_s of them be sampled. The estimate is
    sum_s (V_s / V) * mean over the n_s, and by Hoeffding's inequality (1963; it holds for sampling
    without replacement) P(estimate <= r - t) <= exp(-2 t^2 / sum_s ((V_s / V)^2 / n_s)).
    A stratum that is sampled whole adds no error. Where n_s = 0, all attention of the stratum is
    taken to go to the key.
    """
    dtype, device = statistics_dtype(q), q.device
    batch, heads = q.shape[:2]
    kv_heads, keys = k.shape[1], k.shape[2]
    visible, sampled = sample.all_visibility_counts(keys)
    share = visible.double() / visible.sum(dim=0)
    unsampled = (sampled == 0) & (visible > 0)
    partly = (sampled < visible) & ~unsampled
    error = torch.where(partly, share.square() / sampled.clamp(min=1), 0.0).sum(dim=0)
    order = torch.cat(sample.rows).argsort()
    rows = torch.cat(sample.rows)[order].to(device)
    # Each stratum is summed separately: its weight depends on the key.
    member = torch.zeros(len(sample.rows), len(rows), dtype=dtype)
    stratum = torch.repeat_interleave(torch.tensor([len(r) for r in sample.rows]))[order]
    member[stratum, torch.arange(len(rows))] = 1
    member = member.to(device)
    mask = AttentionMask(causal=True, positions=rows) if sample.causal else OPEN
    shift = lse[:, :, rows].to(dtype)
    shift = shift.masked_fill(shift == -torch.inf, torch.inf)
    shape = (batch * kv_heads, heads // kv_heads, len(sample.rows), keys)
    mass = torch.zeros(shape, dtype=dtype, device=device)
    for tile in score_tiles(q[:, :, rows], k, scale=scale, mask=mask, softcap=softcap, shift=shift):
        mass[tile.pairs, :, :, tile.cols] += member[:, tile.rows] @ tile.scores.exp_()
    weight = (share / sampled.clamp(min=1)).to(device, dtype)
    estimate = (mass.reshape(batch, heads, *shape[2:]) * weight).sum(dim=2)
    upper = estimate + (share * unsampled).sum(dim=0).to(device, dtype)
    margin = (error * math.log(1.0 / miss) / 2.0).sqrt()
    total = estimate * visible.sum(dim=0).to(device, dtype)
    return Screened(upper, total, margin.to(device, dtype))
