"""Screening: estimates against the full map, and the bound on the probability of a miss."""

import math

import numpy as np
import pytest
import torch

import sinkwise as sw
from sinkwise.attention.reference import attention
from sinkwise.attention.screen import QuerySample, Screen, screen
from sinkwise.core.records import AttentionMask
from tests.oracles.received import received as oracle_received
from tests.planted import Planted, PlantedAttention, kinds, tokens

BATCH, HEADS, KV_HEADS, WIDTH = 2, 6, 3, 5


class EvenAttention(PlantedAttention):
    """Keys as wide as values, as torch's fused kernel needs, which returns the log-sum-exp."""

    def forward(self, x):
        q, k, v = (getattr(self, name)(x) for name in self.names[:3])
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
        wider = v.shape[-1] - k.shape[-1]
        q, k = (torch.nn.functional.pad(t, (0, wider)) for t in (q, k))
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=self.causal, scale=self.scale
        )
        return self.o_proj(y.transpose(1, 2).flatten(2))


def problem(length: int, causal: bool, seed: int = 0):
    """Random queries and keys with their exact received attention [batch head key]."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(BATCH, HEADS, length, WIDTH, generator=generator, dtype=torch.float64) * 2
    k = torch.randn(BATCH, KV_HEADS, length, WIDTH, generator=generator, dtype=torch.float64) * 2
    mask = AttentionMask(causal=causal)
    whole = attention(q, k, k, scale=0.7, mask=mask)
    seen = torch.ones(length, length, dtype=torch.bool)
    seen = (seen.tril() if causal else seen).expand(BATCH, HEADS, length, length)
    counted = np.ones((BATCH, length), dtype=bool)
    exact = oracle_received(whole.weights.numpy(), seen.numpy(), counted)
    return q, k, whole, torch.from_numpy(np.asarray(exact[2])), torch.from_numpy(exact[0])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [7, 61, 131])
def test_reading_every_query_is_exact(length: int, causal: bool) -> None:
    q, k, whole, exact, mass = problem(length, causal)
    sample = Screen(rows=length, stratum_rows=length).sample(length, causal)
    found = screen(q, k, whole.lse, sample, scale=0.7, miss=1e-6)
    torch.testing.assert_close(found.received, exact, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.mass, mass, rtol=1e-10, atol=1e-12)
    assert found.margin.max() == 0


@pytest.mark.parametrize("causal", [False, True])
def test_the_estimate_is_unbiased(causal: bool) -> None:
    q, k, whole, exact, _ = problem(67, causal)
    plan = Screen(rows=11, stratum_rows=5)
    total = torch.zeros_like(exact)
    for draw in range(400):
        sample = plan.sample(67, causal, draw)
        found = screen(q, k, whole.lse, sample, scale=0.7, miss=1e-6)
        total += found.mass / sample.all_visibility_counts(67)[0].sum(dim=0)
    readable = torch.ones(67, dtype=torch.bool)
    if causal:  # near the end of a stratum there may be nothing to read
        readable[57:] = True
    error = (total / 400 - exact).abs()[..., readable]
    assert error.mean() < 0.01
    # A wrong weight (no strata) is far off.
    assert (exact - exact.mean()).abs().mean() > 0.01


def test_strata_cover_the_sequence_once() -> None:
    for length in (1, 5, 127, 128, 129, 300, 4096):
        parts = Screen().strata(length, causal=True)
        assert sorted(i for part in parts for i in part) == list(range(length))
        rows = Screen().sample(length, True).rows
        assert len(rows[0]) == min(length, 128)
        assert all(set(r.tolist()) <= set(p) for r, p in zip(rows, parts, strict=True))


def test_queries_that_see_a_key_are_counted_right() -> None:
    sample = Screen(stratum_rows=3).sample(41, causal=True, call_seed=5)
    for stratum, part in enumerate(sample.strata):
        visible, sampled = sample.visibility_counts(stratum, 41)
        rows = sample.rows[stratum].tolist()
        assert visible.tolist() == [sum(i >= j for i in part) for j in range(41)]
        assert sampled.tolist() == [sum(i >= j for i in rows) for j in range(41)]


@pytest.mark.parametrize("causal", [False, True])
def test_a_sink_is_missed_no_more_often_than_promised(causal: bool) -> None:
    """The worst case for sampling: a third of the queries give the key all, the rest nothing."""
    length, miss, threshold = 211, 0.05, 0.3
    share = 0.34
    q = torch.zeros(1, 1, length, 2, dtype=torch.float64)
    k = torch.zeros(1, 1, length, 2, dtype=torch.float64)
    k[0, 0, 0, 0] = 60.0
    k[0, 0, 1, 1] = 60.0
    order = torch.randperm(length, generator=torch.Generator().manual_seed(1))
    giving = order[: math.ceil(share * length)]
    q[0, 0, :, 1] = 1.0
    q[0, 0, giving, 0], q[0, 0, giving, 1] = 1.0, 0.0
    mask = AttentionMask(causal=causal)
    whole = attention(q, k, k, scale=1.0, mask=mask)
    assert whole.weights[0, 0, :, 0].mean() >= threshold
    plan = Screen(rows=20, stratum_rows=8)
    missed = over = 0
    for draw in range(1000):
        sample = plan.sample(length, causal, draw)
        found = screen(q, k, whole.lse, sample, scale=1.0, miss=miss)
        missed += bool(found.received[0, 0, 0] < threshold - found.margin[0])
        over += bool(found.received[0, 0, 0] < threshold)
    assert missed / 1000 <= miss
    assert over / 1000 > miss, "without the margin sinks would be missed"


def test_the_margin_at_the_default_sample() -> None:
    """A sink that receives 0.3 is missed with a probability below 1e-6."""
    for length, causal in ((4096, True), (1370, False), (65536, True)):
        sample = Screen().sample(length, causal)
        assert isinstance(sample, QuerySample)
        q = torch.zeros(1, 1, length, 2)
        lse = torch.log(torch.arange(1, length + 1.0) if causal else torch.full((length,), length))
        if length > 5000:
            q, k = q[:, :, :length], torch.zeros(1, 1, length, 2)
        else:
            k = torch.zeros(1, 1, length, 2)
        margin = screen(q, k, lse[None, None], sample, scale=1.0, miss=1e-6).margin
        assert margin.max() < 0.3, "a margin of the threshold would let every key through"
        assert sample.cost < 0.2


@pytest.mark.parametrize("causal", [False, True])
def test_a_screened_scan_reports_the_same_events(causal: bool) -> None:
    targets = [[0, None, 1], [1, 0, None]]
    model = Planted(targets, kind=EvenAttention, causal=causal)
    inputs = tokens(2, 1409, {0: [0], 1: [3, 700]}, empty=[3])
    layout = kinds("cls", "register", rest="patch")
    full = sw.scan(model, [inputs], layout=layout, rules="mean")
    quick = sw.scan(model, [inputs], layout=layout, rules="mean", screen=True)
    assert quick.meta["screen"]["calls"]["screened"] > 0
    assert quick.meta["screen"]["calls"]["exact"] == 0
    assert len(full.events) > 0
    names = ["sample", "layer", "head", "token", "kind", "mechanism"]
    assert quick.events.select(names).equals(full.events.select(names))
    for column in ("received", "routed_share", "min_attention", "value_ratio", "stable_rank"):
        assert quick.events[column].to_list() == pytest.approx(
            full.events[column].to_list(), rel=1e-4, abs=1e-5
        )
    first = quick.layers["received_first"].to_list()
    assert first == pytest.approx(full.layers["received_first"].to_list(), abs=1e-5)
