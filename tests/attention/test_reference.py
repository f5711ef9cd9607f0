"""The reference attention against a float64 loop, closed forms and torch's own kernel."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from sinkwise.attention.reference import attention, visibility
from sinkwise.core.records import OPEN, AttentionMask
from tests.oracles.arrays import array
from tests.oracles.attention import attention as oracle
from tests.oracles.cases import ADDITIVES, ALLOWED, SINKS, Case, cases, close, differs, make


def run(case: Case):
    return attention(case.q, case.k, case.v, sink_logit=case.sink_logit, **case.options)


def agrees(case: Case):
    result = run(case)
    weights, out, lse = case.expected
    close(result.weights, weights, case.tolerance)
    close(result.out, out, case.tolerance * max(1, float(case.v.abs().max())))
    close(result.lse, lse, case.tolerance)
    return result


@settings(max_examples=30, deadline=None)
@given(cases())
def test_any_combination(case):
    result = agrees(case)
    high = torch.float64 if case.q.dtype == torch.float64 else torch.float32
    assert result.weights.dtype == result.lse.dtype == high


@settings(max_examples=30, deadline=None)
@given(cases())
def test_visibility_of_any_mask(case):
    seen = visibility(case.mask, *case.sizes, device=case.q.device)
    assert seen.dtype == torch.bool
    np.testing.assert_array_equal(array(seen.expand(case.sizes)), case.visible)


@pytest.mark.parametrize("allowed", ALLOWED)
@pytest.mark.parametrize("additive", ADDITIVES)
def test_grouped_heads_under_every_mask(allowed, additive):
    agrees(make(group=2, causal=True, offset=2, window=5, allowed=allowed, additive=additive))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("additive", ADDITIVES)
def test_half_precision_is_computed_in_float32(dtype, additive):
    case = make(dtype=dtype, group=2, causal=True, additive=additive, sink="per head", softcap=3.7)
    result = agrees(case)
    assert result.weights.dtype == result.lse.dtype == torch.float32


@pytest.mark.parametrize("sink", SINKS)
def test_row_without_any_visible_key(sink):
    case = make(allowed="blank", sink=sink)
    result = agrees(case)
    blank = ~torch.from_numpy(case.visible).any(-1)
    assert blank.any()
    assert (result.weights[blank] == 0).all()
    assert (result.out[blank] == 0).all()
    expected = torch.tensor(-math.inf, dtype=case.q.dtype)
    if case.sink_logit is not None:
        expected = case.sink_logit
    assert torch.equal(result.lse[blank], expected.expand(result.lse.shape)[blank])


def test_lowest_hides_a_whole_row_too():
    lowest = torch.finfo(torch.float32).min
    mask = AttentionMask(additive=torch.full((1, 1, 1, 5), lowest))
    case = replace(make(query=3, key=5, dtype=torch.float32), mask=mask)
    result = agrees(case)
    assert (result.weights == 0).all() and (result.lse == -math.inf).all()


def test_sink_logit_scales_the_output_by_a_sigmoid():
    plain, case = make(), make(sink="per head")
    without, result = run(plain), run(case)
    share = torch.sigmoid(without.lse - case.sink_logit)
    close(result.out, without.out * share[..., None], 1e-10)
    close(result.weights.sum(-1), share, 1e-10)


def test_softmax_one_is_a_sink_logit_of_zero():
    case = replace(make(sink=0.0), q=torch.zeros(2, 3, 17, 7, dtype=torch.float64))
    close(run(case).weights, np.full((2, 3, 17, 17), 1 / 18), 1e-12)


def test_published_example_of_a_sink_logit():
    torch.manual_seed(0)
    v = torch.randn(6, 4)[None, None]
    scores = torch.tensor([0.1, -0.2, 0, 0.2, -0.1, 0])
    q, k = torch.ones(1, 1, 1, 1), scores[None, None, :, None]
    plain = attention(q, k, v, scale=1.0)
    sink = attention(q, k, v, scale=1.0, sink_logit=torch.full((1, 1, 1), 3.0))
    assert plain.out.norm().item() == pytest.approx(0.83, abs=0.005)
    assert sink.out.norm().item() == pytest.approx(0.19, abs=0.005)
    assert 1 - sink.weights.sum().item() == pytest.approx(0.77, abs=0.005)


def test_two_keys_are_a_logistic_function():
    q = torch.tensor([[[[2.0]]]], dtype=torch.float64)
    k = torch.tensor([[[[1.5], [-0.5]]]], dtype=torch.float64)
    result = attention(q, k, k, scale=0.25)
    assert result.weights[0, 0, 0, 0].item() == pytest.approx(1 / (1 + math.exp(-1.0)), abs=1e-14)
    assert result.lse.item() == pytest.approx(math.log(math.exp(0.75) + math.exp(-0.25)), abs=1e-14)


def test_large_scores_do_not_overflow():
    case = make(dtype=torch.float32)
    result = run(replace(case, q=case.q * 1e4))
    assert torch.isfinite(result.lse).all()
    close(result.weights.sum(-1), np.ones((2, 3, 17)), 1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_torch_kernel_agrees(causal):
    case = make(group=2, causal=causal)
    expected = torch.nn.functional.scaled_dot_product_attention(
        case.q, case.k, case.v, is_causal=causal, scale=case.scale, enable_gqa=True
    )
    close(run(case).out, expected, 1e-10)


def full() -> Case:
    """Every option at once, so that each mistake shows."""
    return make(
        group=2,
        causal=True,
        offset=2,
        window=7,
        additive="alibi",
        softcap=1.9,
        sink="per head",
    )


def wrong(case: Case, mistake: str):
    """The weights with one mistake made on purpose."""
    q, k, scale, softcap, mask, sink = (
        array(case.q),
        array(case.k),
        case.scale,
        case.softcap,
        case.mask,
        case.sink_logit,
    )
    group = q.shape[1] // k.shape[1]
    heads = np.arange(q.shape[1])
    if mistake == "no scale":
        scale = 1.0
    elif mistake == "scale of the head size":
        scale = q.shape[3] ** -0.5
    elif mistake == "no soft cap":
        softcap = None
    elif mistake == "no offset":
        mask = replace(mask, offset=0)
    elif mistake == "window without the query":
        mask = replace(mask, window=mask.window + 1)
    elif mistake == "window of one less":
        mask = replace(mask, window=mask.window - 1)
    elif mistake == "no bias":
        mask = replace(mask, additive=None)
    elif mistake == "no sink logit":
        sink = None
    elif mistake == "heads interleaved":
        k = k[:, heads % k.shape[1]]
    elif mistake == "bias before the soft cap":
        # The cap is undone on the sum, so that the plain formula applies it to score + bias.
        k = k.repeat(group, axis=1)
        bias = np.broadcast_to(array(mask.additive), case.sizes)
        scores = q @ k.swapaxes(2, 3) * scale + bias
        scores = np.where(case.visible, softcap * np.tanh(scores / softcap), -np.inf)
        total = np.exp(scores).sum(-1, keepdims=True) + np.exp(array(sink))[..., None]
        return np.exp(scores) / total
    elif mistake == "softmax over queries":
        plain = case.expected[0]
        lse = case.expected[2][..., None]
        scores = np.where(case.visible, np.exp(np.log(np.where(plain > 0, plain, 1)) + lse), 0)
        return scores / np.maximum(scores.sum(2, keepdims=True), 1e-300)
    weights, _, _ = oracle(q, k, k, scale=scale, softcap=softcap, mask=mask, sink_logit=sink)
    return weights


@pytest.mark.parametrize(
    "mistake",
    [
        "no scale",
        "scale of the head size",
        "no soft cap",
        "no offset",
        "window without the query",
        "window of one less",
        "no bias",
        "no sink logit",
        "heads interleaved",
        "bias before the soft cap",
        "softmax over queries",
    ],
)
def test_a_wrong_formula_would_show(mistake):
    case = full()
    weights = agrees(case).weights
    differs(weights, wrong(case, mistake), by=1e-2)


def hidden(mask: AttentionMask, mistake: str) -> AttentionMask:
    if mistake == "additive ignored":
        return replace(mask, additive=None)
    if mistake == "allowed ignored":
        return replace(mask, allowed=None)
    if mistake == "allowed inverted":
        return replace(mask, allowed=~mask.allowed)
    if mistake == "not causal":
        return replace(mask, causal=False, window=None)
    return replace(mask, window=mask.window + 1)


@pytest.mark.parametrize(
    "mistake",
    ["additive ignored", "allowed ignored", "allowed inverted", "not causal", "longer window"],
)
@pytest.mark.parametrize("additive", ["inf", "lowest"])
def test_a_wrong_visibility_would_show(mistake, additive):
    case = make(causal=True, offset=2, window=5, allowed="head", additive=additive)
    seen = visibility(case.mask, *case.sizes, device=case.q.device).expand(case.sizes)
    other = replace(case, mask=hidden(case.mask, mistake))
    assert (array(seen) == case.visible).all()
    assert (array(seen) != other.visible).any()


def test_open_mask_sees_everything():
    assert visibility(OPEN, 2, 3, 5, 7, device=torch.device("cpu")).expand(2, 3, 5, 7).all()
