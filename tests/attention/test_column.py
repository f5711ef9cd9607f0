"""Columns of the attention map against the whole map."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkwise.attention.column import columns
from tests.oracles.arrays import array
from tests.oracles.cases import (
    ADDITIVES,
    ALLOWED,
    PADDINGS,
    SINKS,
    Case,
    cases,
    close,
    differs,
    make,
)


def run(case: Case, events, lse=None):
    batch, head, key = (torch.tensor(x, dtype=torch.int64) for x in zip(*events, strict=True))
    if lse is None:
        high = torch.float64 if case.q.dtype == torch.float64 else torch.float32
        lse = torch.from_numpy(case.expected[2]).to(high)
    return columns(case.q, case.k, lse, batch=batch, head=head, key=key, **case.options)


def expected(case: Case, events):
    return np.stack([case.expected[0][b, h, :, j] for b, h, j in events])


def everywhere(case: Case):
    """Every key of every head, out of order and the first one twice."""
    batch, head, _, key = case.sizes
    events = [(b, h, j) for j in range(key) for b in range(batch) for h in range(head)]
    return [*events[::-1], events[0]]


def agrees(case: Case, tolerance=None):
    events = everywhere(case)
    result = run(case, events)
    assert result.shape == (len(events), case.sizes[2])
    close(result, expected(case, events), case.tolerance if tolerance is None else tolerance)
    return result


@settings(max_examples=30, deadline=None)
@given(cases(), st.data())
def test_any_combination(case, data):
    batch, head, _, key = case.sizes
    event = st.tuples(*(st.integers(0, size - 1) for size in (batch, head, key)))
    events = data.draw(st.lists(event, min_size=1, max_size=7))
    close(run(case, events), expected(case, events), case.tolerance)


@pytest.mark.parametrize("allowed", ALLOWED)
@pytest.mark.parametrize("additive", ADDITIVES)
@pytest.mark.parametrize("padding", PADDINGS)
def test_every_mask(allowed, additive, padding):
    agrees(make(causal=True, offset=2, allowed=allowed, additive=additive, padding=padding))


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_sink_logit_is_in_the_log_sum_exp(sink, dtype):
    agrees(make(sink=sink, allowed="blank", dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"causal": True, "additive": "alibi"}, {"softcap": 1.9}])
def test_half_precision_is_computed_in_float32(dtype, options):
    assert agrees(make(dtype=dtype, group=2, **options), 1e-4).dtype == torch.float32


def test_window_and_longer_sequence():
    case = make(batch=1, kv_head=1, query=131, causal=True, window=29, group=2)
    agrees(case)


def test_hidden_pairs_are_exactly_zero():
    case = make(causal=True, window=3)
    events = everywhere(case)
    seen = np.stack([case.visible[b, h, :, j] for b, h, j in events])
    assert (array(run(case, events))[~seen] == 0).all()
    assert (array(run(case, events))[seen] > 0).all()


def test_no_events_give_no_rows():
    case = make()
    none = torch.zeros(0, dtype=torch.int64)
    lse = torch.from_numpy(case.expected[2])
    result = columns(case.q, case.k, lse, batch=none, head=none, key=none, **case.options)
    assert result.shape == (0, 17)


def wrong(case: Case, mistake: str):
    """The case whose right columns are what the mistake would give, with its own lse or ours."""
    kept = torch.from_numpy(case.expected[2])
    if mistake == "no scale":
        return replace(case, scale=1.0), kept
    if mistake == "no soft cap":
        return replace(case, softcap=None), kept
    if mistake == "no bias":
        return replace(case, mask=replace(case.mask, additive=None)), kept
    if mistake == "not causal":
        return replace(case, mask=replace(case.mask, causal=False)), kept
    if mistake == "no offset":
        return replace(case, mask=replace(case.mask, offset=0)), kept
    if mistake == "heads interleaved":
        heads = torch.arange(case.q.shape[1]) % case.k.shape[1]
        return replace(case, k=case.k[:, heads], v=case.v[:, heads]), kept
    if mistake == "sink logit left out":
        case = replace(case, sink_logit=None)
        return case, torch.from_numpy(case.expected[2])
    raise AssertionError(mistake)


@pytest.mark.parametrize(
    "mistake",
    [
        "no scale",
        "no soft cap",
        "no bias",
        "not causal",
        "no offset",
        "heads interleaved",
        "sink logit left out",
    ],
)
def test_a_wrong_column_would_show(mistake):
    case = make(group=2, causal=True, offset=2, additive="alibi", softcap=1.9, sink="per head")
    events = everywhere(case)
    right = agrees(case)
    other, lse = wrong(case, mistake)
    # exp(score - lse) with the mistake in the score and the true lse.
    factor = np.exp(other.expected[2] - lse.numpy())
    mistaken = np.stack(
        [(other.expected[0][b, h] * factor[b, h][:, None])[:, j] for b, h, j in events]
    )
    differs(right, mistaken, by=0.01)


def test_a_row_instead_of_a_column_would_show():
    case = make(query=17, key=17)
    events = everywhere(case)
    rows = np.stack([case.expected[0][b, h, j] for b, h, j in events])
    differs(agrees(case), rows, by=0.1)
