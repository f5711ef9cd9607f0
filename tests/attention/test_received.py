"""Received attention: both methods against a float64 loop, and closed forms."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from jaxtyping import TypeCheckError

from sinkwise.attention.received import received_mass, visibility_counts
from sinkwise.core.records import OPEN, AttentionMask
from sinkwise.errors import InputError
from tests.oracles.arrays import array
from tests.oracles.cases import ADDITIVES, PADDINGS, SINKS, Case, cases, close, differs, make
from tests.oracles.received import received as oracle

METHODS = ("auto", "tiles", "flash")
CPU = torch.device("cpu")


def run(case: Case, method: str = "auto", **options):
    return received_mass(
        case.q,
        case.k,
        sink_logit=case.sink_logit,
        counted=case.counted,
        method=method,
        **(case.options | options),
    )


def count(case: Case):
    batch, _, query, key = case.sizes
    return visibility_counts(case.mask, (batch, query, key), case.counted, case.q.device)


def queries(case: Case) -> int:
    return max(1, case.sizes[2])


def agrees(case: Case, method: str, tolerance: float | None = None):
    """Mass as a share of the queries, and the log-sum-exp."""
    tolerance = case.tolerance if tolerance is None else tolerance
    result = run(case, method)
    close(array(result.mass) / queries(case), case.received.mass / queries(case), tolerance)
    close(result.lse, case.expected[2], tolerance)
    return result


@pytest.mark.parametrize("method", ["auto", "tiles"])
@settings(max_examples=30, deadline=None)
@given(case=cases())
def test_any_combination(method, case):
    agrees(case, method)


@settings(max_examples=30, deadline=None)
@given(case=cases(softcap=False))
def test_any_combination_transposed(case):
    agrees(case, "flash")


@settings(max_examples=30, deadline=None)
@given(case=cases())
def test_visibility_counts_of_any_mask(case):
    result = count(case)
    batch, head, _, key = case.sizes
    close(result.count.double().expand(batch, head, key), case.received.seen, 0)
    close(result.uniform.double().expand(batch, head, key), case.received.uniform, 1e-6)


LENGTHS = {17: (2, 3), 131: (2, 3), 523: (1, 1)}
MASKS = {
    "open": {},
    "causal": {"causal": True},
    "cached": {"causal": True, "offset": 5},
    "window": {"causal": True, "window": 29},
    "left": {"causal": True, "padding": "left"},
    "right": {"padding": "right"},
    "alibi": {"causal": True, "additive": "alibi"},
    "lowest": {"additive": "lowest"},
    "sink": {"causal": True, "sink": "per head"},
}


@cache
def long(length: int, mask: str, dtype: torch.dtype) -> Case:
    batch, kv_head = LENGTHS[length]
    options = {"group": 2 if length < 500 else 1} | MASKS[mask]
    return make(batch=batch, kv_head=kv_head, query=length, dtype=dtype, **options)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("length", "mask"),
    [(17, name) for name in MASKS]
    + [(131, name) for name in ("open", "cached", "left", "lowest", "sink")]
    + [(523, name) for name in ("causal", "right")],
)
def test_lengths_below_and_above_a_tile(length, mask, dtype, method):
    agrees(long(length, mask, dtype), method)


@cache
def crowded() -> Case:
    """More heads than share a tile, two to a key head, each with its own sink logit."""
    return make(
        batch=1, kv_head=11, group=2, query=131, causal=True, padding="left", sink="per head"
    )


@pytest.mark.parametrize("method", METHODS)
def test_more_heads_than_a_tile(method):
    agrees(crowded(), method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_half_precision_inputs(dtype, mask, method):
    case = long(17, mask, dtype)
    result = agrees(case, method, 1e-4)
    assert result.mass.dtype == result.lse.dtype == torch.float32


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_with_large_scores(dtype, method):
    """A log-sum-exp near 100 must not be rounded to the input's eight bits."""
    case = make(query=131, batch=1, kv_head=1, dtype=dtype)
    agrees(replace(case, q=case.q * 12), method, 1e-4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("causal", [False, True])
def test_padding_is_no_query(padding, causal, method):
    case = make(padding=padding, causal=causal, group=2)
    agrees(case, method)
    if padding == "none":
        return
    # What stands in a padded place cannot matter.
    other = replace(case, q=case.q.masked_fill(~case.counted[:, None, :, None], 3.0))
    close(run(other, method).mass, case.received.mass, 1e-9)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("allowed", ["none", "blank"])
def test_sink_logit(sink, allowed, method):
    agrees(make(sink=sink, allowed=allowed), method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("additive", ADDITIVES)
@pytest.mark.parametrize("causal", [False, True])
def test_bias(additive, causal, method):
    agrees(make(additive=additive, causal=causal, offset=2, group=2), method)


@pytest.mark.parametrize("method", ["auto", "tiles"])
def test_softcap(method):
    case = make(softcap=1.9, additive="alibi", causal=True)
    differs(agrees(case, method).mass, run(replace(case, softcap=None), method).mass, by=0.01)


def test_transposed_method_refuses_a_softcap():
    with pytest.raises(InputError, match="softcap"):
        run(make(softcap=1.9), "flash")


def test_unknown_method_is_an_error():
    # The annotation catches it where shapes and types are checked, the function itself elsewhere.
    with pytest.raises((InputError, TypeCheckError), match="method"):
        run(make(), "fast")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mask", MASKS)
def test_log_sum_exp_given_beforehand(mask, method):
    case = long(17, mask, torch.float64)
    lse = torch.from_numpy(case.expected[2])
    result = run(case, method, lse=lse)
    close(result.mass, case.received.mass, 1e-9)
    close(result.lse, lse, 0)
    # It is used, not computed again: a query whose lse grows by log 2 gives half as much.
    halved = run(case, method, lse=lse + math.log(2))
    close(halved.mass, case.received.mass / 2, 1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_every_query_hands_out_one(method):
    case = make(padding="left", causal=True)
    given_out = array(run(case, method).mass).sum(-1)
    close(given_out, np.broadcast_to(array(case.counted).sum(-1)[:, None], given_out.shape), 1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_samples_and_heads_do_not_mix(method):
    case = make(padding="right", additive="lowest")
    whole = run(case, method).mass
    mask = replace(
        case.mask, allowed=case.mask.allowed[[1, 0]], additive=case.mask.additive[[1, 0]]
    )
    turned = replace(
        case, q=case.q[[1, 0]], k=case.k[[1, 0]], mask=mask, counted=case.counted[[1, 0]]
    )
    close(run(turned, method).mass[[1, 0]], whole, 1e-10)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("length", [2, 17, 131])
def test_uniform_attention_gives_every_key_one(length, method):
    case = make(batch=1, kv_head=2, query=length)
    mass = run(replace(case, q=torch.zeros_like(case.q)), method).mass
    close(mass, np.ones((1, 2, length)), 1e-10)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("length", [2, 17, 131])
def test_uniform_causal_attention_gives_harmonic_tails(length, method):
    case = make(batch=1, kv_head=2, query=length, causal=True)
    case = replace(case, q=torch.zeros_like(case.q))
    tails = np.array([sum(1 / (i + 1) for i in range(j, length)) for j in range(length)])
    close(run(case, method).mass, np.broadcast_to(tails, (1, 2, length)), 1e-10)
    counts = count(case)
    close(counts.count.double()[0, 0], length - np.arange(length), 0)
    close(counts.uniform.double()[0, 0], tails / (length - np.arange(length)), 1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_uniform_window(method):
    case = make(batch=1, kv_head=1, query=17, causal=True, window=5)
    mass = array(run(replace(case, q=torch.zeros_like(case.q)), method).mass)[0, 0]
    assert mass[0] == pytest.approx(1 + 1 / 2 + 1 / 3 + 1 / 4 + 1 / 5, abs=1e-10)
    assert mass[7] == pytest.approx(1, abs=1e-10)
    assert mass[16] == pytest.approx(1 / 5, abs=1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_hard_sink_receives_everything(method):
    q = torch.full((1, 1, 13, 1), 1.0, dtype=torch.float64)
    k = torch.zeros(1, 1, 11, 1, dtype=torch.float64)
    k[0, 0, 4] = 500.0
    mass = received_mass(q, k, scale=1.0, method=method).mass
    close(mass, 13.0 * (np.arange(11) == 4)[None, None], 1e-10)


def test_key_that_nobody_sees_has_no_mean():
    mask = AttentionMask(causal=True)
    result = visibility_counts(mask, (1, 5, 7), None, CPU)
    assert result.count[0, 0].tolist() == [5, 4, 3, 2, 1, 0, 0]
    assert torch.isnan(result.uniform[0, 0, 5:]).all()
    assert not torch.isnan(result.uniform[0, 0, :5]).any()


def test_uniform_counts_all_visible_keys():
    """The padded query is excluded from the mean; all keys that the others see count."""
    counted = torch.tensor([[True, True, False]])
    result = visibility_counts(OPEN, (1, 3, 4), counted, CPU)
    assert result.count[0, 0].tolist() == [2, 2, 2, 2]
    close(result.uniform[0, 0].double(), np.full(4, 0.25), 1e-7)


def wrong_mass(case: Case, mistake: str):
    weights, _, _ = case.expected
    if mistake == "mean over keys instead of queries":
        return weights.sum(-1)
    if mistake == "padding counted":
        return oracle(weights, case.visible, None).mass
    if mistake == "no scale":
        return replace(case, scale=1.0).received.mass
    if mistake == "not causal":
        return replace(case, mask=replace(case.mask, causal=False)).received.mass
    if mistake == "no bias":
        return replace(case, mask=replace(case.mask, additive=None)).received.mass
    if mistake == "no sink logit":
        return replace(case, sink_logit=None).received.mass
    if mistake == "heads interleaved":
        heads = torch.arange(case.q.shape[1]) % case.k.shape[1]
        return replace(case, k=case.k[:, heads], v=case.v[:, heads]).received.mass
    if mistake == "divided by seen":
        return np.nan_to_num(case.received.received)
    raise AssertionError(mistake)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "mistake",
    [
        "mean over keys instead of queries",
        "padding counted",
        "no scale",
        "not causal",
        "no bias",
        "no sink logit",
        "heads interleaved",
        "divided by seen",
    ],
)
def test_a_wrong_mass_would_show(mistake, method):
    case = make(group=2, causal=True, padding="right", additive="alibi", sink="per head")
    mass = agrees(case, method).mass
    differs(mass, wrong_mass(case, mistake), by=0.01)


def wrong_counts(case: Case, mistake: str):
    """(count, uniform) with one mistake."""
    right = case.received
    sees = case.visible
    keys = sees.sum(-1)
    if mistake == "all queries":
        return np.full_like(right.seen, sees.shape[2]), None
    if mistake == "padding counted":
        other = oracle(case.expected[0], sees, None)
        return other.seen, other.uniform
    if mistake == "uniform divided by all queries":
        return None, right.uniform * right.seen / sees.shape[2]
    if mistake == "one over the mean number of keys":
        uses = sees & array(case.counted)[:, None, :, None]
        return None, right.seen / np.maximum((uses * keys[..., None]).sum(2), 1)
    if mistake == "one over the length":
        return None, np.full_like(right.uniform, 1 / sees.shape[3])
    raise AssertionError(mistake)


@pytest.mark.parametrize(
    "mistake",
    [
        "all queries",
        "padding counted",
        "uniform divided by all queries",
        "one over the mean number of keys",
        "one over the length",
    ],
)
def test_a_wrong_count_would_show(mistake):
    case = make(causal=True, padding="right", allowed="head")
    result = count(case)
    close(result.count.double(), case.received.seen, 0)
    close(result.uniform.double(), case.received.uniform, 1e-6)
    counts, uniform = wrong_counts(case, mistake)
    if counts is not None:
        differs(result.count.double(), counts, by=0.5)
    if uniform is not None:
        differs(result.uniform, uniform, by=1e-2)


def test_division_by_all_queries_would_show():
    """The last key is seen by one query only, which gives it a share of order one."""
    case = make(causal=True)
    received = array(run(case).mass) / array(count(case).count)
    close(received, case.received.received, 1e-10)
    differs(received, array(run(case).mass) / case.sizes[2], by=0.1)
