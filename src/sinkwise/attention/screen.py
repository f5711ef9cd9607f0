"""Screening: which keys can be sinks at all, from a sample of the queries."""

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
    """How many queries are read, and how surely no sink is missed."""

    rows: int = 192
    """Queries read of attention that looks both ways."""
    stratum_rows: int = 64
    """Queries read of each stratum of causal attention; of the last one, twice as many."""
    miss: float = 1e-6
    """Probability, at most, that a given sink is missed (Hoeffding's inequality)."""
    seed: int = 0
    """Seed of the sample; each call of a model draws its own."""

    def strata(self, queries: int, causal: bool) -> list[range]:
        """Both ways: one stratum. Causal: the end of the sequence, then parts of doubling length
        towards its start, as the later a key is, the fewer queries see it.
        """
        if not causal:
            return [range(queries)]
        parts = []
        stop, length = queries, 2 * self.stratum_rows
        while stop > 0:
            parts.append(range(max(0, stop - length), stop))
            stop = parts[-1].start
            length = queries - stop
        return parts

    def sample(self, queries: int, causal: bool, draw: int = 0) -> "Sample":
        """Queries to read: the whole last stratum, a random part of each other one."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + draw)
        strata = self.strata(queries, causal)
        rows = []
        for part in strata:
            wanted = self.rows if not causal else self.stratum_rows * (1 + (part is strata[0]))
            chosen = torch.randperm(len(part), generator=generator)[:wanted].sort().values
            rows.append(chosen + part.start)
        return Sample(causal, queries, strata, rows)


@dataclass(frozen=True, eq=False)
class Sample:
    """The queries that a screening reads."""

    causal: bool
    queries: int
    strata: list[range]
    rows: list[Int[Tensor, " _"]]
    """Positions of the queries read, a stratum each."""

    @property
    def cost(self) -> float:
        """Scores computed, as a share of all visible ones."""
        if not self.causal:
            return len(self.rows[0]) / self.queries
        read = sum(len(r) * part.stop for r, part in zip(self.rows, self.strata, strict=True))
        return read / (self.queries * (self.queries + 1) / 2)

    def all_viewers(self, keys: int) -> list[tuple[Tensor, Tensor]]:
        """`viewers` of every stratum."""
        return [self.viewers(stratum, keys) for stratum in range(len(self.rows))]

    def viewers(self, stratum: int, keys: int) -> tuple[Tensor, Tensor]:
        """For each key, how many queries of a stratum see it, and how many of those are read."""
        part, rows = self.strata[stratum], self.rows[stratum]
        if not self.causal:
            return torch.full((keys,), len(part)), torch.full((keys,), len(rows))
        key = torch.arange(keys)
        seen = (part.stop - key.clamp(min=part.start)).clamp(min=0)
        return seen, len(rows) - torch.searchsorted(rows, key)


class Screened(NamedTuple):
    """What a sample of the queries says about every key."""

    received: Float[Tensor, "batch head key"]
    """Estimated received attention; queries of strata of which none was read count as 1."""
    mass: Float[Tensor, "batch head key"]
    """Estimated sum of A_ij over all queries i, those of unread strata left out."""
    margin: Float[Tensor, " key"]
    """A key whose estimate lies below a threshold by more than this reaches it with a probability
    of at most `miss`; 0 where every query that sees it was read.
    """


def screen(
    q: Float[Tensor, "batch head query head_dim"],
    k: Float[Tensor, "batch kv_head key head_dim"],
    lse: Float[Tensor, "batch head query"],
    sample: Sample,
    *,
    scale: float,
    miss: float,
    softcap: float | None = None,
) -> Screened:
    """Estimate every key's received attention from the sampled queries.

    With V_s viewers of the key in stratum s of which n_s are read, the estimate is
    sum_s (V_s / V) * mean over those read, and by Hoeffding's inequality (1963; it holds for
    sampling without replacement) P(estimate <= r - t) <= exp(-2 t^2 / sum_s (V_s / V)^2 / n_s).
    A stratum that is read whole adds no error; one of which nothing is read counts as all its
    attention going to the key.
    """
    dtype, device = statistics_dtype(q), q.device
    batch, heads = q.shape[:2]
    kv_heads, keys = k.shape[1], k.shape[2]
    seen, read = (torch.stack(part) for part in zip(*sample.all_viewers(keys), strict=True))
    share = seen.double() / seen.sum(dim=0)
    blind = (read == 0) & (seen > 0)
    error = torch.where((read < seen) & ~blind, share.square() / read.clamp(min=1), 0.0).sum(dim=0)
    order = torch.cat(sample.rows).argsort()
    rows = torch.cat(sample.rows)[order].to(device)
    # Rows of one stratum are added up apart: their weight depends on the key.
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
    weight = (share / read.clamp(min=1)).to(device, dtype)
    estimate = (mass.reshape(batch, heads, *shape[2:]) * weight).sum(dim=2)
    upper = estimate + (share * blind).sum(dim=0).to(device, dtype)
    margin = (error * math.log(1.0 / miss) / 2.0).sqrt()
    total = estimate * seen.sum(dim=0).to(device, dtype)
    return Screened(upper, total, margin.to(device, dtype))
