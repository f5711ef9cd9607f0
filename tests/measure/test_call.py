"""The statistics of one attention call against float64 loops over its explicit map."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from sinkwise.core.layout import KINDS, code
from sinkwise.core.records import OPEN, AttentionMask, AttentionRecord, AttentionSite
from sinkwise.diagnosis.rules import Rules
from sinkwise.measure.call import EVENT_FIELDS, CallMeter
from sinkwise.measure.call_tokens import CallTokens
from sinkwise.measure.residual import residual_statistics
from tests.oracles import rank, rules
from tests.oracles.arrays import array
from tests.oracles.cases import make

DIM = 11
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "grouped": {"causal": True, "group": 3, "kv_head": 2},
    "both ways, grouped": {"group": 2},
    "left padding": {"causal": True, "padding": "left", "query": 41},
    "right padding": {"causal": True, "padding": "right", "query": 41, "group": 2},
    "padding, both ways": {"padding": "left"},
    "softcap": {"causal": True, "softcap": 9.0},
    "sink logit": {"causal": True, "sink": "per head", "group": 2},
    "large sink logit": {"sink": 3.0},
    "alibi": {"causal": True, "additive": "alibi", "group": 2},
    "window": {"causal": True, "window": 33, "query": 53},
    "holes": {"allowed": "query", "query": 47},
    "holes by head": {"allowed": "head", "query": 47},
    "cached keys": {"causal": True, "offset": 3, "query": 37},
}


def planted(seed=0, dtype=torch.float32, sinks=(0, 3), **options):
    """A case whose first keys receive much attention, to a degree that differs between heads."""
    case = make(**{"query": 37, "dtype": torch.float64, "seed": seed, **options})
    random = torch.Generator().manual_seed(seed + 1)
    batch, kv_heads, _, width = case.k.shape
    case.q[...] = 0.3 * case.q + 1.5
    starts = [0] * batch
    if case.counted is not None:
        starts = case.counted.to(torch.int8).argmax(1).tolist()
    for b, sink in [(b, sink) for b in range(batch) for sink in sinks]:
        strength = 0.4 + 1.3 * torch.rand(kv_heads, 1, generator=random, dtype=torch.float64)
        case.k[b, :, starts[b] + sink] = strength * torch.ones(width, dtype=torch.float64)
        case.v[b, :, starts[b] + sink] *= 2 * torch.rand(kv_heads, 1, generator=random)
    sink = case.sink_logit
    additive = case.mask.additive
    mask = replace(case.mask, additive=None if additive is None else additive.to(dtype))
    return replace(
        case,
        **{name: getattr(case, name).to(dtype) for name in ("q", "k", "v")},
        sink_logit=None if sink is None else sink.to(dtype),
        mask=mask,
    )


def record_of(case, *, eager=False, known=True, scaled=True, seed=0):
    """The case as a record with output weights and a block's input."""
    random = torch.Generator().manual_seed(seed + 2)
    weights, out, lse = (torch.as_tensor(part) for part in case.expected)
    heads, width = case.q.shape[1], case.v.shape[3]
    o = torch.randn(heads, DIM, width, generator=random)
    gamma = torch.randn(DIM, generator=random) if scaled else None
    x = torch.randn(case.q.shape[0], case.q.shape[2], DIM, generator=random)
    site = AttentionSite(name="attn", q=None, k=None, v=None, o=o, layer_scale=gamma)
    return AttentionRecord(
        layer=0,
        name="attn",
        q=case.q,
        k=case.k,
        v=case.v,
        out=out.to(case.v.dtype),
        scale=case.scale,
        mask=case.mask,
        softcap=case.softcap,
        sink_logit=case.sink_logit,
        weights=weights.to(case.q.dtype) if eager else None,
        lse=None if eager or seed % 2 else lse.float(),
        residual=x,
        site=site if known else None,
    )


def real_of(case):
    return case.counted if case.q.shape[2] == case.k.shape[2] else None


def measure(case, record, rule="auto", meter=None, codes=None):
    meter = meter or CallMeter(Rules.named(rule))
    real = real_of(case)
    shape = (case.k.shape[0], case.k.shape[2])
    codes = torch.full(shape, code("text")) if codes is None else codes
    residual = residual_statistics(record.residual, real) if record.residual is not None else None
    return meter.measure(record, CallTokens(codes, real, real), residual)


def events_of(stats):
    """{(sample, head, key): {field: number}}."""
    keys = zip(*(index.tolist() for index in stats.sinks), strict=True)
    columns = {name: stats.fields[name].tolist() for name in EVENT_FIELDS}
    return {
        key: {name: column[i] for name, column in columns.items()} for i, key in enumerate(keys)
    }


def oracle(case, record, rule):
    """The same from the explicit map, one event at a time."""
    weights = case.expected[0]
    counted = real_of(case)
    judge = {"mean": rules.mean, "relaxed": rules.relaxed}.get(rule)
    options = {} if judge else {"epsilon": 0.3}
    found = (judge or rules.literal)(weights, case.visible, counted, **options)
    statistics = case.received if counted is not None else replace(case, counted=None).received
    group = case.q.shape[1] // case.k.shape[1]
    result = {}
    for b, h, s in found:
        rows = np.ones(weights.shape[2], bool) if counted is None else array(counted[b])
        column = weights[b, h, rows & case.visible[b, h, :, s], s]
        v = case.v[b, h // group]
        o, gamma = record.site.o[h], record.site.layer_scale
        spectrum = rank.ranks(rank.update(weights[b, h], v, o, gamma, rows))
        keys = None if counted is None else array(counted[b])
        norms = np.sqrt((array(record.residual[b]) ** 2).sum(-1))
        kept = norms if keys is None else norms[keys]
        result[b, h, s] = {
            "received": statistics.received[b, h, s],
            "received_excess": statistics.received[b, h, s] - statistics.uniform[b, h, s],
            "routed_share": np.mean(column >= 0.5),
            "min_attention": column.min(),
            "value_ratio": rank.value_ratio(rank.value_norms(v, o, gamma), s, keys),
            "value_ratio_raw": rank.value_ratio(rank.value_norms(v), s, keys),
            "stable_rank": spectrum.stable_rank,
            "rank_one_energy": spectrum.rank_one_energy,
            "update_norm": spectrum.update_norm,
            "token_norm_ratio": norms[s] / np.sort(kept)[(len(kept) - 1) // 2]
            if len(norms) == case.k.shape[2]
            else math.nan,
        }
    return result


def agree(found, right, tolerance):
    assert found.keys() == right.keys()
    for key, fields in right.items():
        for name, value in fields.items():
            assert found[key][name] == pytest.approx(value, rel=tolerance, abs=1e-6, nan_ok=True), (
                key,
                name,
            )


@pytest.mark.parametrize("rule", ["mean", "relaxed", "literal"])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("option", OPTIONS)
def test_every_field_is_the_oracles(option, rule, seed):
    case = planted(seed, sinks=(0, 3) if rule == "mean" else (0,), **OPTIONS[option])
    record = record_of(case, seed=seed)
    right = oracle(case, record, rule)
    assert right or rule == "literal", "no event to compare"
    fused = events_of(measure(case, record, rule))
    agree(fused, right, 1e-4)
    eager = events_of(measure(case, record_of(case, eager=True, seed=seed), rule))
    agree(eager, right, 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("eager", [True, False])
def test_half_precision(dtype, eager):
    case = planted(2, dtype=dtype, causal=True, group=2)
    record = record_of(case, eager=eager)
    stats = measure(case, record, "mean")
    found, right = events_of(stats), oracle(case, record, "mean")
    for key in right:  # a rounded weight may fall on the other side of 0.5
        share = found[key].pop("routed_share"), right[key].pop("routed_share")
        assert share[0] == pytest.approx(share[1], abs=0.1 if eager else 1e-6)
    agree(found, right, 2e-2)
    assert all(stats.fields[name].dtype == torch.float32 for name in EVENT_FIELDS)


def test_double_precision_is_kept():
    case = planted(3, dtype=torch.float64, causal=True)
    record = record_of(case)
    record.lse, record.residual = None, record.residual.double()
    record.site = replace(
        record.site, o=record.site.o.double(), layer_scale=record.site.layer_scale.double()
    )
    agree(events_of(measure(case, record, "mean")), oracle(case, record, "mean"), 1e-9)


@pytest.mark.parametrize("option", ["plain", "left padding", "sink logit", "holes by head"])
def test_shares_by_kind(option):
    case = planted(1, **OPTIONS[option])
    weights, shape = case.expected[0], (case.k.shape[0], case.k.shape[2])
    codes = torch.arange(shape[1]).expand(shape) % 3
    real = real_of(case)
    rows = np.ones(shape, bool) if real is None else array(real)
    stats = measure(case, record_of(case), codes=codes)
    for b in range(shape[0]):
        share = weights[b][:, rows[b]].mean(axis=1)
        for kind in range(len(KINDS)):
            wanted = share[:, array(codes[b] == kind).astype(bool)].sum(axis=1)
            np.testing.assert_allclose(stats.by_kind[b, :, kind], wanted, atol=1e-5)
        first = case.received.received[b, :, rows[b].argmax()]
        np.testing.assert_allclose(stats.first[b], first, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rule", ["mean", "relaxed", "literal"])
def test_uniform_attention_is_never_a_sink(rule, causal):
    """q = 0 at every length from 8 to 512."""
    meter = CallMeter(Rules.named(rule))
    mask = AttentionMask(causal=True) if causal else OPEN
    random = torch.Generator().manual_seed(0)
    for length in range(8, 513):
        k, v = torch.randn(2, 1, 1, length, 3, generator=random)
        seen = torch.arange(1.0, length + 1) if causal else torch.full((length,), float(length))
        record = AttentionRecord(
            layer=0, name="", q=torch.zeros(1, 1, length, 3), k=k, v=v, out=v, scale=1.0,
            mask=mask, lse=seen.log()[None, None],
        )  # fmt: skip
        codes = torch.zeros(1, length, dtype=torch.int64)
        stats = meter.measure(record, CallTokens(codes))
        assert len(stats.sinks.key) == 0, (length, stats.sinks.key)
        assert float(stats.first) == pytest.approx(float((1 / seen).mean()), rel=1e-4)


def test_uniform_attention_has_no_excess():
    anything = replace(Rules.named("mean").causal, threshold=0.0, min_times_uniform=0.0)
    for case in (planted(0, causal=True), planted(0), planted(0, padding="left", causal=True)):
        flat = replace(case, q=torch.zeros_like(case.q))
        rules_ = Rules(causal=anything, bidirectional=anything)
        stats = measure(flat, record_of(flat), meter=CallMeter(rules_))
        assert len(stats.sinks.key) > 0
        assert stats.fields["received_excess"].abs().max() < 1e-6


def test_a_causal_mask_is_known_by_what_it_hides():
    """`auto` uses the mean rule if queries see no later key, whatever the form of the mask."""
    case = planted(0, causal=True)
    right = oracle(case, record_of(case), "mean")
    triangle = torch.ones(37, 37, dtype=torch.bool).tril()[None, None]
    floor = torch.zeros(1, 1, 37, 37).masked_fill(~triangle, torch.finfo(torch.float32).min)
    for mask in (AttentionMask(allowed=triangle), AttentionMask(additive=floor), case.mask):
        record = replace(record_of(case), mask=mask)
        agree(events_of(measure(case, record)), right, 1e-4)
    open_case = planted(0)
    record = record_of(open_case)
    agree(events_of(measure(open_case, record)), oracle(open_case, record, "relaxed"), 1e-4)
    assert oracle(open_case, record, "relaxed").keys() != oracle(open_case, record, "mean").keys()


def test_one_short_sample_does_not_choose_the_rule():
    """A sample of one token cannot show causality; the others of its batch do."""
    case = planted(0, causal=True, batch=3)
    real = torch.ones(3, 37, dtype=torch.bool)
    real[0, 1:] = False
    case = replace(
        case, counted=real, mask=AttentionMask(causal=True, allowed=real[:, None, None, :])
    )
    record = record_of(case)
    right = oracle(case, record, "mean")
    assert len(right) > len(oracle(case, record, "relaxed"))
    agree(events_of(measure(case, record)), right, 1e-4)


@pytest.mark.parametrize("eager", [True, False])
def test_what_padding_holds_does_not_matter(eager):
    case = planted(0, causal=True, padding="left", query=41)
    record = record_of(case, eager=eager)
    clean = measure(case, record, "mean")
    gone = ~case.counted
    for name in ("q", "out", "lse", "weights"):
        value = getattr(record, name)
        if value is not None:
            value.masked_fill_(
                gone[:, None, :, None] if value.dim() == 4 else gone[:, None], torch.nan
            )
    record.residual[gone] = torch.nan
    dirty = measure(case, record, "mean")
    assert len(clean.sinks.key) and torch.equal(clean.sinks.key, dirty.sinks.key)
    for name in EVENT_FIELDS:
        assert torch.equal(clean.fields[name], dirty.fields[name]), name
    assert torch.equal(clean.by_kind, dirty.by_kind) and torch.equal(clean.first, dirty.first)
    assert dirty.finite.all()


def test_padding_is_no_sink_even_where_the_mask_forgot_it():
    case = planted(0)
    sinks = measure(case, record_of(case), "relaxed").sinks.key.unique()
    assert len(sinks)
    real = torch.ones(2, 37, dtype=torch.bool)
    real[:, sinks] = False
    padded = replace(case, counted=real)
    stats = measure(padded, record_of(padded), "relaxed")
    assert len(stats.sinks.key) == 0
    right = padded.received.received[:, :, int((~real[0]).to(torch.int8).argmin())]
    np.testing.assert_allclose(stats.first, right, atol=1e-5)


@pytest.mark.parametrize(
    ("where", "bad"),
    [(w, b) for w in ("q", "out") for b in (torch.nan, torch.inf, -torch.inf)]
    + [("lse", torch.nan)],
)
def test_a_broken_head_is_named_and_leaves_the_others_alone(bad, where):
    case = planted(0, causal=True)
    record = record_of(case)
    if where == "q":
        record.lse = None
    clean = events_of(measure(case, record, "mean"))
    getattr(record, where)[1, 2, 30:] = bad
    stats = measure(case, record, "mean")
    broken = torch.zeros_like(stats.finite)
    broken[1, 2] = True
    assert torch.equal(~stats.finite, broken)
    assert stats.by_kind[1, 2].isnan().all() and stats.first[1, 2].isnan()
    assert not stats.by_kind[stats.finite].isnan().any()
    assert events_of(stats) == {key: e for key, e in clean.items() if key[:2] != (1, 2)}
    assert any(key[:2] == (1, 2) for key in clean)


def test_without_output_weights_there_is_only_the_raw_ratio():
    case = planted(0, causal=True, group=2)
    known = measure(case, record_of(case, scaled=False), "mean")
    stats = measure(case, record_of(case, known=False), "mean")
    assert stats.fields["value_ratio"].isnan().all() and len(stats.sinks.key)
    assert torch.equal(stats.fields["value_ratio_raw"], known.fields["value_ratio_raw"])
    identity = torch.eye(case.v.shape[3]).expand(case.q.shape[1], -1, -1)
    for key, fields in events_of(stats).items():
        u = rank.update(case.expected[0][key[:2]], case.v[key[0], key[1] // 2], identity[0])
        assert fields["stable_rank"] == pytest.approx(rank.ranks(u).stable_rank, rel=1e-4)


def test_a_huge_value_does_not_swallow_the_others():
    case = planted(0, causal=True)
    case.v[:, :, 0] *= 1e9
    record = record_of(case)
    agree(events_of(measure(case, record, "mean")), oracle(case, record, "mean"), 1e-4)


def test_calls_that_share_a_mask_and_those_that_do_not():
    """One meter over several calls gives what fresh meters give."""
    meter = CallMeter(Rules.named("mean"))
    cases = [
        planted(seed, causal=True, padding=p) for seed, p in ((0, "left"), (0, "none"), (1, "left"))
    ]
    cases.append(replace(cases[0], counted=cases[0].counted.clone()))
    cases[3].counted[0, -4:] = False
    cases.append(replace(cases[1], mask=replace(cases[1].mask, window=34)))
    for case in [*cases, *reversed(cases)]:
        record = record_of(case)
        alone, shared = measure(case, record, "mean"), measure(case, record, "mean", meter=meter)
        assert events_of(alone) == events_of(shared)
    assert len(meter.visibility) > 0
    meter.visibility.clear()
    assert len(meter.visibility) == 0


def test_all_padding_is_undefined_not_zero():
    case = planted(0, causal=True)
    real = torch.ones(2, 37, dtype=torch.bool)
    real[1] = False
    record = record_of(replace(case, counted=real))
    stats = measure(replace(case, counted=real), record, "mean")
    assert stats.by_kind[1].isnan().all() and stats.first[1].isnan().all()
    assert set(stats.sinks.batch.tolist()) == {0}


@pytest.mark.parametrize("sink", [0, 2])
def test_visibility_from_the_map_alone(sink):
    """A causal map without its scores, and a sink so strong that all other weights underflow."""
    weights = torch.zeros(2, 3, 37, 37)
    weights[:, :, range(sink), range(sink)] = 1.0
    weights[:, :, sink:, sink] = 1.0
    case = planted(0)
    record = replace(record_of(case), weights=weights, lse=None, faithful=False)
    stats = measure(case, record)
    assert stats.sinks.key.tolist() == [sink] * 6
    if sink == 0:
        uniform = np.mean([1 / (i + 1) for i in range(37)])
        excess = stats.fields["received_excess"].numpy()
        np.testing.assert_allclose(excess, 1 - uniform, rtol=1e-5)
