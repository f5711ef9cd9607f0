"""Logits in the denominator: every form of softmax call and option, against the formula written
out in float64 without any softmax."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sinkwise.errors import InputError
from sinkwise.mitigations.sink_softmax import SinkSoftmaxMode

HEADS = 6
LOGIT = torch.tensor([-1.0, 0.0, 0.5, 2.0, -3.0, 40.0], dtype=torch.float64)


def weights_by_hand(scores, logit=LOGIT):
    """exp(s) / (exp(b) + sum exp(s))."""
    powers = scores.exp()
    return powers / (logit.exp()[:, None, None] + powers.sum(-1, keepdim=True))


def drawn(queries=5, keys=5, kv_heads=HEADS, batch=2):
    torch.manual_seed(1)
    q = torch.randn(batch, HEADS, queries, 8, dtype=torch.float64)
    k, v = torch.randn(2, batch, kv_heads, keys, 8, dtype=torch.float64)
    return q, k, v


def fused(*args, count=1, **kwargs):
    mode = SinkSoftmaxMode("attn", LOGIT)
    with mode:
        for _ in range(count):
            out = F.scaled_dot_product_attention(*args, **kwargs)
    mode.finish()
    return out


FLOAT = torch.randn(2, 1, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
BOOL = FLOAT > -0.5
CALLS = {
    "plain": (5, {}, None),
    "scale": (5, {"scale": 0.7}, None),
    "bool": (7, {"attn_mask": BOOL}, BOOL),
    "bool-2d": (7, {"attn_mask": BOOL[0, 0]}, BOOL[0, 0]),
    "float": (7, {"attn_mask": FLOAT}, FLOAT),
    "float-heads": (7, {"attn_mask": FLOAT.expand(-1, HEADS, -1, -1)}, FLOAT),
    "causal": (5, {"is_causal": True}, torch.ones(5, 5).tril().bool()),
    "causal-more-keys": (7, {"is_causal": True}, torch.ones(5, 7).tril().bool()),
    "causal-fewer-keys": (3, {"is_causal": True}, torch.ones(5, 3).tril().bool()),
    "empty": (7, {"attn_mask": torch.zeros(5, 7).bool()}, torch.zeros(5, 7).bool()),
}


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
@pytest.mark.parametrize("name", CALLS)
def test_sdpa_honours_every_option(name, kv_heads):
    keys, options, mask = CALLS[name]
    q, k, v = drawn(keys=keys, kv_heads=kv_heads)
    group = HEADS // kv_heads
    key, value = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ key.mT * options.get("scale", 8**-0.5)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    expected = weights_by_hand(scores) @ value
    found = fused(q, k, v, enable_gqa=group > 1, **options)
    torch.testing.assert_close(found, expected)
    if group > 1:  # transformers repeats them instead
        torch.testing.assert_close(fused(q, key, value, **options), expected)


@pytest.mark.parametrize("mask", [None, "bool", "heads", "rows"])
def test_one_token_of_grouped_heads_as_transformers_packs_it(mask):
    q, k, v = drawn(queries=1, keys=7, kv_heads=2)
    given = None
    scores = q @ k.repeat_interleave(3, 1).mT * 8**-0.5
    if mask == "bool":
        given = seen = BOOL[:, :, :1]
    elif mask == "heads":
        seen = torch.rand(2, HEADS, 1, 7) > 0.3
        given = seen.reshape(2, 2, 3, 7)
    elif mask == "rows":
        given = torch.rand(2, 1, 3, 7) > 0.3
        seen = given.expand(2, 2, 3, 7).reshape(2, HEADS, 1, 7)
    if given is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    expected = weights_by_hand(scores) @ v.repeat_interleave(3, 1)
    found = fused(q.reshape(2, 2, 3, 8), k, v, attn_mask=given)
    torch.testing.assert_close(found.reshape(2, HEADS, 1, 8), expected)


def test_queries_shared_by_all_samples():
    q, k, v = drawn()
    expected = weights_by_hand(q[:1] @ k.mT * 8**-0.5) @ v
    torch.testing.assert_close(fused(q[:1], k, v), expected)


def test_dropout_falls_on_the_weights():
    """Each weight is dropped or doubled: the mean of many runs is the output without dropout."""
    q, k, v = drawn(batch=1)
    torch.manual_seed(0)
    many = fused(*(t.expand(4000, -1, -1, -1) for t in (q, k, v)), dropout_p=0.5)
    assert many.std(0).max() > 0.1
    assert (many.mean(0) - fused(q, k, v)[0]).abs().max() < 0.06


@pytest.mark.parametrize("shape", [(2, 5, 5, 8), (2, HEADS, 1, 5, 8), (5, 8), (2, 2, 2, 8)])
def test_queries_that_are_not_those_of_its_heads_are_an_error(shape):
    x = torch.randn(shape)
    with pytest.raises(InputError, match=rf"'attn' has queries .*need \[batch, {HEADS}, query"):
        fused(x, x, x)


def test_causal_beside_a_mask_is_an_error_as_in_torch():
    q, k, v = drawn()
    with pytest.raises(InputError, match="is_causal=True with an attn_mask"):
        fused(q, k, v, attn_mask=torch.ones(5, 5).bool(), is_causal=True)


SOFTMAX = {
    "functional": lambda s: F.softmax(s, dim=-1),
    "functional positional": lambda s: F.softmax(s, 3),
    "torch": lambda s: torch.softmax(s, -1),
    "torch by name": lambda s: torch.softmax(input=s, dim=3),
    "method": lambda s: s.softmax(-1),
    "method by name": lambda s: s.softmax(dim=3),
    "module": nn.Softmax(dim=-1),
}


@pytest.mark.parametrize("way", SOFTMAX)
def test_every_way_to_write_a_softmax(way):
    scores = torch.randn(2, HEADS, 5, 7, dtype=torch.float64)
    scores[1, :, 2] = -math.inf
    mode = SinkSoftmaxMode("attn", LOGIT)
    with mode:
        found = SOFTMAX[way](scores)
    mode.finish()
    torch.testing.assert_close(found, weights_by_hand(scores))


def test_batch_and_heads_in_one_axis_as_torch_s_own_attention_has_them():
    scores = torch.randn(2, HEADS, 5, 7, dtype=torch.float64)
    mode = SinkSoftmaxMode("attn", LOGIT)
    with mode:
        found = F.softmax(scores.flatten(0, 1), dim=-1)
    torch.testing.assert_close(found.unflatten(0, (2, HEADS)), weights_by_hand(scores))


def test_the_dtype_of_a_softmax_is_that_of_its_logits():
    scores = torch.randn(2, HEADS, 5, 7).to(torch.bfloat16)
    logit = LOGIT + 1 / 3  # which bfloat16 would round
    mode = SinkSoftmaxMode("attn", logit)
    with mode:
        found = F.softmax(scores, dim=-1, dtype=torch.float64)
    torch.testing.assert_close(found, weights_by_hand(scores.double(), logit))


@pytest.mark.parametrize("sink", [-1e4, -20.0, 0.0, 100.0, 1e4])
def test_logits_of_any_size_are_finite_in_half_precision(sink):
    scores = torch.randn(2, HEADS, 5, 7).half()
    scores[:, :, 0] = -math.inf
    mode = SinkSoftmaxMode("attn", torch.full((HEADS,), sink, dtype=torch.float16))
    with mode:
        found = scores.float().softmax(-1)
    assert found.isfinite().all() and (found[:, :, 0] == 0).all()
    assert (found.sum(-1)[:, :, 1:] > 0.99).all() == (sink < -15)


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.randn(2, HEADS, 5, 7).softmax(2),
        lambda: torch.randn(2, 5, 5, 7).softmax(-1),
        lambda: torch.randn(5, 7).softmax(-1),
        lambda: torch.randn(2, 1, 5, 7, HEADS).softmax(-1),
    ],
)
def test_other_softmaxes_are_left_alone_and_not_counted(call):
    torch.manual_seed(2)
    plain = call()
    torch.manual_seed(2)
    mode = SinkSoftmaxMode("attn", LOGIT)
    with mode:
        found = call()
    assert torch.equal(found, plain)
    with pytest.raises(InputError, match="'attn' ran 0 softmaxes that its sink logits can join"):
        mode.finish()


def test_two_in_one_run_are_an_error():
    with pytest.raises(InputError, match="'attn' ran 2 softmaxes"):
        fused(*drawn(), count=2)
