"""Scans of models with planted sinks: every verdict, token and number is known beforehand."""

import itertools
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch

import sinkwise as sw
from tests.planted import OddAttention as Odd
from tests.planted import (
    Planted,
    PlantedAttention,
    SquashedAttention,
    expected,
    kinds,
    tokens,
    value_ratios,
)

LENGTHS = (33, 47, 128, 257, 512)
NOP, BROADCAST, ANY = 0, 1, 2


def plan(causal, length):
    """(targets of each layer, marks, tokens without payload, mechanism of each marker's sinks).

    Causal sinks must be seen by 32 queries: at 33 tokens only the first two are.
    """
    late = length // 2 if length >= 80 or not causal else 1
    second = (late - 1) // 2
    marks = {0: [0], 1: [late], 2: [0, late], 3: [second]}
    empty = [0, (0, second), (1, second)]  # marker 3 has no payload in two samples of four
    layers = [[0, 1, None, 3], [None, 3, 0, 1], [1, None, 1, 0]]
    mechanism = {0: ["nop"] * 4, 1: ["broadcast"] * 4, 3: ["nop", "nop", "broadcast", "broadcast"]}
    if second == 0:  # too short for a third place
        layers = [[0, 1, None, 0], [None, 1, 0, 1], [1, None, 1, 0]]
    if causal:  # two sinks share the attention: the mean rule sees both
        layers[2][1] = 2
        mechanism[2] = {0: ["nop"] * 4, late: ["broadcast"] * 4}
    return layers, marks, empty, mechanism


def verdict_of(mechanisms):
    share = [mechanisms.count(name) / len(mechanisms) for name in ("nop", "broadcast")]
    if max(share) >= 2 / 3:
        return ("nop", "broadcast")[int(share[1] > share[0])]
    return "mixed"


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_planted_heads_are_all_found(length, causal, kv_heads, seed):
    layers, marks, empty, mechanism = plan(causal, length)
    model = Planted(layers, causal=causal, kv_heads=kv_heads)
    x = tokens(4, length, marks, empty=empty, seed=seed)
    layout = kinds("bos" if causal else "cls", rest="text" if causal else "patch")
    found = sw.scan(model, [x[:3], x[3:]], layout=layout)
    states = [x]
    with torch.no_grad():
        for layer in model.layers:
            states.append(layer(states[-1]))
    rows = 0
    for (layer, targets), head in itertools.product(enumerate(layers), range(4)):
        marker = targets[head]
        here = (pl.col("layer") == layer) & (pl.col("head") == head)
        summary = found.heads.filter(here).row(0, named=True)
        events = found.events.filter(here)
        if marker is None:
            assert summary["verdict"] == "none" and len(events) == 0 and summary["sink_share"] == 0
            assert summary["kind"] is None and summary["token"] is None
            continue
        sinks = marks[marker]
        assert sorted(set(events["token"])) == sinks
        assert len(events) == 4 * len(sinks) and summary["sink_share"] == 1
        rows += len(events)
        everything = []
        for token in sinks:
            one = events.filter(pl.col("token") == token).sort("sample")
            right = expected(length, sinks, token, causal=causal)
            ratio, raw = value_ratios(model, states[layer], layer, head, token)
            close(one["received"], [right.received] * 4, 1e-5)
            close(one["received_excess"], [right.excess] * 4, 1e-5)
            if sinks != [0, 1]:  # query 1 gives each of two neighbours one half, give or take
                close(one["routed_share"], [right.routed_share] * 4, 1e-6)
            close(one["min_attention"], [right.min_attention] * 4, 1e-4)
            close(one["value_ratio"], ratio, 1e-4)
            close(one["value_ratio_raw"], raw, 1e-4)
            norms = states[layer].double().norm(dim=-1)
            own = norms[:, token] / norms.sort(dim=1).values[:, (length - 1) // 2]
            close(one["token_norm_ratio"], own, 1e-4)
            names = mechanism[marker]
            names = names[token] if isinstance(names, dict) else names
            assert one["mechanism"].to_list() == names
            kind = layout(x).kind(0, token)
            assert set(one["kind"]) == {kind}
            everything += names
        assert summary["verdict"] == verdict_of(everything)
        assert summary["token"] == sinks[0]
        assert summary["nop_share"] == pytest.approx(everything.count("nop") / len(everything))
        # Theta depends on the constant 1 and one marker only: its rank is one.
        assert summary["spike"] == pytest.approx(1.0, abs=1e-6)
        assert summary["spike_random"] < 0.5
    assert rows == len(found.events)
    assert found.meta["samples"] == 4 and set(found.heads["samples"]) == {4}


def close(actual, wanted, tolerance):
    np.testing.assert_allclose(
        np.array(actual, dtype=float), np.asarray(wanted), rtol=tolerance, atol=tolerance
    )


N, B = [0, 0, 0, 0], [1, 1, 1, 1]
R = [3, 3, 3, 3]


@pytest.mark.parametrize(
    ("layers", "empty_register", "prescription"),
    [
        ([N, N], False, "gate"),
        ([B, B], False, "registers"),
        ([N, B], False, "gate+registers"),
        ([[None] * 4, [None] * 4], False, "none"),
        ([R, R], False, "none"),
        ([R, R], True, "gate"),
        ([N, R], False, "gate"),
        ([B, R], True, "gate+registers"),
        ([B, R], False, "registers"),
        ([[0, 0, 0, 0], [0, 0, 0, 1]], False, "gate"),
        ([[1, 1, 1, 1], [0, None, None, None]], False, "registers"),
        ([[0, 0, 0, 0], [1, 1, None, None]], False, "gate+registers"),
    ],
)
@pytest.mark.parametrize("causal", [True, False])
def test_each_composition_gets_its_prescription(layers, empty_register, prescription, causal):
    model = Planted(layers, causal=causal)
    empty = [0, 2] if empty_register else [0]
    x = tokens(3, 71, {0: [0], 1: [7], 3: [2]}, empty=empty)
    layout = kinds("cls", "register", "register", "register")
    found = sw.scan(model, [x], layout=layout)
    assert found.verdict().prescription == prescription
    kinds_found = {"cls": N, "patch": B, "register": R}
    for row in found.events.iter_rows(named=True):
        assert layers[row["layer"]][row["head"]] == kinds_found[row["kind"]][0]


def test_eager_and_fused_attention_agree():
    layers, marks, empty, _ = plan(True, 128)
    x = tokens(4, 128, marks, empty=empty)
    one, other = (sw.scan(Planted(layers, kv_heads=2, eager=eager), [x]) for eager in (False, True))
    same(one, other, 2e-5)


def same(one, other, tolerance=0.0, names=True):
    """Counts and words are equal, floats up to `tolerance`."""
    for frame in ("events", "heads", "layers"):
        a, b = getattr(one, frame), getattr(other, frame)
        if not names:
            a, b = a.drop("name"), b.drop("name")
        assert a.schema == b.schema
        floats = [name for name, kind in a.schema.items() if kind.is_float()]
        assert a.drop(floats).equals(b.drop(floats))
        for name in floats:
            close(a[name], b[name], tolerance)


@pytest.mark.parametrize("rule", ["mean", "relaxed", "literal"])
def test_one_rule_can_be_asked_for(rule):
    x = tokens(2, 67, {0: [0], 2: [0, 20]})
    found = sw.scan(Planted([[0, 2]], causal=False), [x], rules=rule)
    heads = found.events.group_by("head").len().sort("head").rows()
    assert heads == ([(0, 2), (1, 4)] if rule == "mean" else [(0, 2)])
    assert found.meta["rules"]["causal"] == found.meta["rules"]["bidirectional"]
    assert found.meta["rules"]["bidirectional"]["name"] == rule


def test_thresholds_are_used():
    x = tokens(2, 67, {1: [3]}, seed=4)
    loose = replace(sw.Rules(), mechanism=sw.MechanismRule(nop_ratio=9.0))
    assert set(sw.scan(Planted([[1]]), [x], rules=loose).events["mechanism"]) == {"nop"}
    strict = replace(sw.Rules(), causal=sw.MeanRule(threshold=0.9999))
    assert len(sw.scan(Planted([[1]]), [x], rules=strict).events) == 0


def test_unknown_weights_are_measured():
    """Attention with unusual parameter names is measured by its Jacobian, with equal results."""
    layers, marks, empty, _ = plan(True, 128)
    x = tokens(4, 128, marks, empty=empty)
    known = sw.scan(Planted(layers, kv_heads=2), [x[:2], x[2:]])
    model = Planted(layers, kind=Odd, kv_heads=2)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    odd = sw.scan(model, [x[:2], x[2:]])
    same(known, odd, 1e-5)
    assert known.meta["sites_measured"] == []
    assert odd.meta["sites_measured"] == [f"layers.{i}.attn" for i in range(3)]
    assert odd.meta["samples"] == 4
    assert before == {name: p.requires_grad for name, p in model.named_parameters()}
    assert all(p.grad is None for p in model.parameters())


def test_without_output_weights_the_raw_ratio_decides():
    x = tokens(3, 67, {0: [0], 1: [5]}, empty=[0])
    found = sw.scan(Planted([[0, 1]], kind=SquashedAttention), [x])
    assert found.events["value_ratio"].is_nan().all()
    assert found.heads["verdict"].to_list() == ["nop", "broadcast"]
    assert found.heads["value_ratio"].null_count() == 2
    raw = value_ratios(Planted([[0, 1]], kind=Odd), x, 0, 1, 5)[1]
    close(found.events.filter(pl.col("head") == 1)["value_ratio_raw"], raw, 1e-5)


def test_value_ratio_is_of_what_is_written():
    """A sink whose value the output projection removes is a NOP, however large the value is."""
    model = Planted([[1]])
    x = tokens(3, 67, {1: [5]})
    attention = model.layers[0].attn
    w_v, w_o = attention.v_proj.weight, attention.o_proj.weight
    value = (x[:, 5] @ w_v.T)[0]
    x[:, 5] = x[:1, 5]
    unit = value / value.norm()
    with torch.no_grad():
        w_o -= torch.outer(w_o @ unit, unit)
    found = sw.scan(model, [x])
    assert found.events["value_ratio"].max() < 1e-5 and found.events["value_ratio_raw"].min() > 0.5
    assert found.heads["verdict"].to_list() == ["nop"]
    raw = replace(sw.Rules(), mechanism=sw.MechanismRule(ratio="raw"))
    assert sw.scan(model, [x], rules=raw).heads["verdict"].to_list() == ["broadcast"]


class Untracked(PlantedAttention):
    """Its scores cannot be tracked to the softmax: only the map itself is known."""

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v, o = (getattr(self, name) for name in self.names)
        q, k, v = (f(x).view(batch, length, self.num_heads, -1).transpose(1, 2) for f in (q, k, v))
        scores = q @ k.transpose(-1, -2) * self.scale
        scores = torch.where(scores > 0, scores * scores.abs(), scores)
        return o((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, -1))


@pytest.mark.parametrize("gain", [3.0, 40.0])
@pytest.mark.parametrize("token", [0, 2])
def test_attention_whose_scores_cannot_be_tracked(gain, token):
    """At a gain of 40 all other weights underflow to 0, but those keys are not masked."""
    model = Planted([[1, 1]], kind=Untracked, causal=False, gain=gain)
    found = sw.scan(model, [tokens(2, 53, {1: [token]})])
    right = expected(53, [token], token, causal=False, gain=gain * gain)
    assert found.events["token"].to_list() == [token] * 4
    close(found.events["received"], [right.received] * 4, 1e-4)
    if gain == 3 or token > 0:  # all to the first token may also be a causal map
        close(found.events["received_excess"], [right.excess] * 4, 1e-4)


def test_uniform_heads_of_a_whole_model():
    for causal in (True, False):
        found = sw.scan(Planted([[None] * 3] * 2, causal=causal), [tokens(2, 61, {})])
        assert len(found.events) == 0 and set(found.heads["verdict"]) == {"none"}
        uniform = np.mean([1 / (i + 1) for i in range(61)]) if causal else 1 / 61
        close(found.layers["received_first"], [uniform] * 2, 1e-6)
        assert found.verdict().prescription == "none"
