"""The rules at their thresholds, and the event rules against loops over random maps."""

import dataclasses
import json
from fractions import Fraction

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sinkwise as sw
from sinkwise.core.layout import code
from sinkwise.core.records import AttentionMask, AttentionRecord
from sinkwise.diagnosis.rules import EVENT_RULES, EventRule
from sinkwise.measure.call import CallMeter
from sinkwise.measure.call_tokens import CallTokens
from tests.oracles import rules as oracle
from tests.oracles.attention import visible
from tests.oracles.received import received


@st.composite
def maps(draw):
    """(weights, mask, counted) whose columns lie on both sides of every threshold."""
    batch, heads = draw(st.sampled_from([(1, 1), (2, 3)]))
    length = draw(st.sampled_from((2, 5, 31, 33, 41)))
    causal = draw(st.booleans())
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    counted = np.ones((batch, length), bool)
    side = draw(st.sampled_from(("none", "left", "right")))
    for b in range(batch):
        gone = 0 if side == "none" else int(random.integers(0, max(1, length - 1)))
        counted[b, : gone if side == "left" else 0] = False
        counted[b, length - gone if side == "right" else length :] = False
    allowed = torch.as_tensor(counted)[:, None, None, :]
    mask = AttentionMask(causal=causal, allowed=None if side == "none" else allowed)
    sees = visible(mask, batch, heads, length, length)
    scores = random.normal(size=(batch, heads, length, length))
    for b in range(batch):
        for h in range(heads):
            for sink in random.integers(0, length, size=2):
                # The odds of the sink against the rest, about even up to nearly all.
                scores[b, h, :, sink] += np.log(length) + random.choice([-0.5, 0.5, 1.5, 5.0])
    weights = np.exp(scores) * sees
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    return weights, mask, counted, sees


def found(rule, weights, mask, counted):
    """Events by the library's rule, computed from the map itself."""
    batch, heads, length, _ = weights.shape
    empty = torch.zeros(batch, heads, length, 1, dtype=torch.float64)
    record = AttentionRecord(
        layer=0, name="", q=empty, k=empty, v=empty + 1, out=empty + 1, scale=1.0, mask=mask,
        weights=torch.as_tensor(weights),
    )  # fmt: skip
    real = None if counted.all() else torch.as_tensor(counted)
    codes = torch.full((batch, length), code("text"))
    meter = CallMeter(sw.Rules(causal=rule, bidirectional=rule))
    stats = meter.measure(record, CallTokens(codes, real, real))
    return set(zip(*(index.tolist() for index in stats.sinks), strict=True))


LIBRARY = {
    "relaxed": (sw.RelaxedRule(), oracle.relaxed, {}),
    "relaxed, other numbers": (
        sw.RelaxedRule(share=0.6, attention=0.3), oracle.relaxed, {"share": 0.6, "attention": 0.3}
    ),
    "mean": (sw.MeanRule(), oracle.mean, {}),
    "mean, other numbers": (
        sw.MeanRule(threshold=0.55, min_queries=3),
        oracle.mean,
        {"threshold": 0.55, "min_queries": 3},
    ),
    "literal": (sw.LiteralRule(), oracle.literal, {"epsilon": 0.3}),
    "literal, other numbers": (sw.LiteralRule(epsilon=0.9), oracle.literal, {"epsilon": 0.9}),
}  # fmt: skip


@pytest.mark.parametrize("name", LIBRARY)
def test_event_rules_are_the_oracles(name):
    rule, judge, options = LIBRARY[name]
    events = 0

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(case=maps())
    def check(case):
        nonlocal events
        weights, mask, counted, sees = case
        right = set(judge(weights, sees, counted, **options))
        events += len(right)
        assert found(rule, weights, mask, counted) == right

    check()
    assert events > 20, "there was nothing to agree on"


def column(values, length=None):
    """A bidirectional map whose key 0 gets these weights; the rest goes to all other keys."""
    length = length or len(values)
    weights = np.zeros((1, 1, length, length))
    weights[0, 0, :, 0] = values
    weights[0, 0, :, 1:] = (1 - np.array(values))[:, None] / (length - 1)
    return weights


@pytest.mark.parametrize(
    ("rule", "values", "event"),
    [
        (sw.RelaxedRule(), [0.5] * 36 + [0.0] * 4, True),  # nine tenths give one half
        (sw.RelaxedRule(), [0.5] * 35 + [0.0] * 5, False),
        (sw.RelaxedRule(), [1.0] * 35 + [0.4999] * 5, False),
        (sw.RelaxedRule(), [1.0] * 36 + [0.0] * 4, True),
        (sw.RelaxedRule(), [0.4999] * 40, False),
        (sw.MeanRule(), [0.3] * 40, True),
        (sw.MeanRule(), [0.2999] * 40, False),
        (sw.MeanRule(), [0.6] * 20 + [0.0] * 20, True),
        (sw.LiteralRule(), [0.7] * 40, True),
        (sw.LiteralRule(), [0.7] * 39 + [0.6999], False),
        (sw.LiteralRule(epsilon=0.1), [0.9] * 40, True),
        (sw.LiteralRule(epsilon=0.1), [1.0] * 39 + [0.8999], False),
        (sw.RelaxedRule(), [1.0] * 3, True),  # all queries of a short sequence
        (sw.LiteralRule(), [1.0] * 3, True),
        (sw.MeanRule(), [1.0] * 31, False),  # fewer than 32 queries
        (sw.MeanRule(), [1.0] * 32, True),
        (sw.MeanRule(threshold=0.01), [0.0624] * 32, False),  # under twice the uniform share
        (sw.MeanRule(threshold=0.01), [0.0626] * 32, True),
        (sw.MeanRule(threshold=0.01, min_times_uniform=3.0), [0.0626] * 32, False),
    ],
)
def test_thresholds(rule, values, event):
    weights = column(values)
    counted = np.ones((1, len(values)), bool)
    assert (found(rule, weights, AttentionMask(), counted) == {(0, 0, 0)}) == event


def test_excess_guards_causal_uniform_attention():
    """Uniform causal attention of 8 queries gives key 0 a mean of 0.34."""
    weights = np.tril(np.ones((8, 8))) / np.arange(1, 9)[:, None]
    mask = AttentionMask(causal=True)
    counted = np.ones((1, 8), bool)
    assert received(weights[None, None], visible(mask, 1, 1, 8, 8)).received[0, 0, 0] > 0.33
    for rule in (sw.MeanRule(min_queries=1), sw.RelaxedRule(), sw.LiteralRule()):
        assert found(rule, weights[None, None], mask, counted) == set()
    careless = sw.MeanRule(min_queries=1, min_times_uniform=0.0)
    assert (0, 0, 0) in found(careless, weights[None, None], mask, counted)


NAN = float("nan")


@pytest.mark.parametrize(
    ("ratio", "raw", "rank", "mechanism"),
    [
        (0.0, 1.0, 1.0, "nop"),
        (0.2, 1.0, 3.0, "nop"),
        (0.2001, 1.0, 1.0, "unclassified"),
        (0.4999, 1.0, 1.0, "unclassified"),
        (0.5, 0.0, 1.5, "broadcast"),
        (0.5, 0.0, 1.5001, "unclassified"),
        (9.0, 0.0, 1.0, "broadcast"),
        (float("inf"), 0.0, 1.0, "broadcast"),
        (9.0, 0.0, NAN, "unclassified"),
        (NAN, 0.1, 1.0, "nop"),
        (NAN, 0.9, 1.0, "broadcast"),
        (NAN, NAN, 1.0, "unclassified"),
        (None, None, None, "unclassified"),
    ],
)
def test_mechanisms(ratio, raw, rank, mechanism):
    schema = dict.fromkeys(("value_ratio", "value_ratio_raw", "stable_rank"), pl.Float32)
    frame = pl.DataFrame([[ratio, raw, rank]], schema=schema, orient="row")
    assert frame.select(sw.MechanismRule().classify()).item() == mechanism
    swapped = frame.select(
        pl.col("value_ratio").alias("value_ratio_raw"), "stable_rank", value_ratio=pl.lit(7.0)
    )
    if ratio is not None and ratio == ratio:
        assert swapped.select(sw.MechanismRule(ratio="raw").classify()).item() == mechanism


def head(nop, broadcast, sinks):
    schema = dict.fromkeys(("sink_share", "nop_share", "broadcast_share"), pl.Float64)
    frame = pl.DataFrame([[sinks, nop, broadcast]], schema=schema, orient="row")
    return frame.select(sw.HeadRule().classify()).item()


@pytest.mark.parametrize(
    ("nop", "broadcast", "sinks", "verdict"),
    [
        (1.0, 0.0, 0.1, "nop"),
        (1.0, 0.0, 0.0999, "none"),
        (0.0, 0.0, 0.0, "none"),
        (0.0, 0.0, None, "none"),
        (2 / 3, 1 / 3, 1.0, "nop"),
        (0.66, 0.34, 1.0, "mixed"),
        (1 / 3, 2 / 3, 1.0, "broadcast"),
        (0.5, 0.5, 1.0, "mixed"),
        (0.5, 0.1666, 1.0, "unclassified"),
        (0.0, 0.0, 1.0, "unclassified"),
    ],
)
def test_heads(nop, broadcast, sinks, verdict):
    assert head(nop, broadcast, sinks) == verdict


def test_a_majority_of_any_count_is_a_majority():
    """Shares are rounded: two thirds of 3, 6, .. 300 events count as two thirds all the same."""
    rows, right = [], []
    for events in range(1, 301):
        for nop in {0, events // 3, events // 2, 2 * events // 3 - 1, -(-2 * events // 3)}:
            broadcast = min(events - nop, max(0, -(-2 * events // 3) - nop))
            if nop < 0:
                continue
            rows.append((1.0, nop / events, broadcast / events))
            shares = Fraction(nop, events), Fraction(broadcast, events)
            names = [
                n for n, s in zip(("nop", "broadcast"), shares, strict=True) if s >= Fraction(2, 3)
            ]
            right.append(
                names[0] if names else "mixed" if sum(shares) >= Fraction(2, 3) else "unclassified"
            )
    schema = dict.fromkeys(("sink_share", "nop_share", "broadcast_share"), pl.Float64)
    frame = pl.DataFrame(rows, schema=schema, orient="row")
    assert frame.select(sw.HeadRule().classify()).to_series().to_list() == right


RULES = [*EVENT_RULES.values(), sw.MechanismRule, sw.HeadRule, sw.ModelRule, sw.Rules]


@pytest.mark.parametrize("kind", RULES)
def test_rules_are_frozen_values(kind):
    rule = kind()
    field = dataclasses.fields(rule)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(rule, field, 1)
    assert rule == kind() and hash(rule) == hash(kind())


def test_describe_gives_every_number_back():
    rules = sw.Rules(
        causal=sw.LiteralRule(epsilon=0.25, min_queries=7),
        bidirectional=sw.RelaxedRule(share=0.8, min_times_uniform=3.5),
        mechanism=sw.MechanismRule(nop_ratio=0.1, ratio="raw"),
        head=sw.HeadRule(majority=0.9),
        model=sw.ModelRule(dominance=0.7),
    )
    text = json.loads(json.dumps(rules.describe()))
    again = sw.Rules(
        causal=EVENT_RULES[text["causal"].pop("name")](**text["causal"]),
        bidirectional=EVENT_RULES[text["bidirectional"].pop("name")](**text["bidirectional"]),
        mechanism=sw.MechanismRule(**text["mechanism"]),
        head=sw.HeadRule(**text["head"]),
        model=sw.ModelRule(**text["model"]),
    )
    assert again == rules


def test_names():
    assert sw.Rules.named("auto") == sw.Rules()
    assert isinstance(sw.Rules().causal, sw.MeanRule)
    assert isinstance(sw.Rules().bidirectional, sw.RelaxedRule)
    for name, kind in EVENT_RULES.items():
        assert kind.name == name and sw.Rules.named(name).causal == kind()
        assert sw.Rules.named(name).bidirectional == kind()
    with pytest.raises(
        sw.InputError, match=r"rule='maen' is unknown; .* auto, relaxed, mean, literal"
    ):
        sw.Rules.named("maen")
    with pytest.raises(TypeError):
        EventRule()
