"""The table of a sink's statistics, and padding of queries and of keys each in its own place."""

import inspect
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch

import sinkwise as sw
from sinkwise.measure import sink_fields
from sinkwise.measure.call import EVENT_FIELDS, CallMeter
from sinkwise.measure.call_tokens import CallTokens
from sinkwise.measure.frames import EVENT_SCHEMA
from sinkwise.measure.sink_fields import ROUTED_ATTENTION, SINK_FIELDS
from tests.measure.test_call import array, events_of, planted, rank, record_of
from tests.planted import Planted, tokens


def test_every_statistic_is_a_described_function_and_a_column():
    assert tuple(SINK_FIELDS) == EVENT_FIELDS
    columns = [name for name in EVENT_SCHEMA if name in SINK_FIELDS]
    assert columns == list(EVENT_FIELDS)
    for name, function in SINK_FIELDS.items():
        assert function.__name__ == name and inspect.getdoc(function)
        assert EVENT_SCHEMA[name] == pl.Float32


def test_a_routed_query_gives_at_least_half():
    """As the relaxed rule has it, and documentation says."""
    assert ROUTED_ATTENTION == 0.5


def measured(case, record, **tokens):
    codes = torch.zeros(case.k.shape[0], case.k.shape[2], dtype=torch.int64)
    meter = CallMeter(sw.Rules.named("relaxed"))
    return meter.measure(record, CallTokens(codes, **tokens))


def test_padded_keys_are_no_sinks_and_no_others():
    """They are left out of candidates and of value ratios; what queries do is the same."""
    case = planted(0)
    record = record_of(case, scaled=False)
    whole = events_of(measured(case, record))
    sink = next(iter(whole))[2]
    real = torch.ones(case.k.shape[0], case.k.shape[2], dtype=torch.bool)
    real[:, 20:31] = False
    assert real[:, sink].all()
    found = events_of(measured(case, record, real_keys=real))
    assert found.keys() == {key for key in whole if real[key[0], key[2]]} and found
    group = case.q.shape[1] // case.k.shape[1]
    for (b, h, s), fields in found.items():
        norms = rank.value_norms(case.v[b, h // group])
        right = rank.value_ratio(norms, s, array(real[b]))
        assert fields["value_ratio_raw"] == pytest.approx(right, rel=1e-4)
        assert fields["value_ratio_raw"] != pytest.approx(whole[b, h, s]["value_ratio_raw"])
        same = ("received", "routed_share", "min_attention", "stable_rank", "update_norm")
        assert [fields[name] for name in same] == [whole[b, h, s][name] for name in same]
    real[:, sink] = False
    assert sink not in {key[2] for key in events_of(measured(case, record, real_keys=real))}


def test_padded_queries_do_not_count():
    """Received attention and updates are over the others; values of all keys are compared."""
    case = planted(0)
    record = record_of(case, scaled=False)
    whole = events_of(measured(case, record))
    real = torch.ones(case.q.shape[0], case.q.shape[2], dtype=torch.bool)
    real[:, 5:9] = False
    found = events_of(measured(case, record, real_queries=real))
    weights = case.expected[0]
    shared = found.keys() & whole.keys()
    assert shared
    for b, h, s in shared:
        column = weights[b, h, array(real[b]).astype(bool), s]
        fields = found[b, h, s]
        assert fields["received"] == pytest.approx(column.mean(), rel=1e-4)
        assert fields["min_attention"] == pytest.approx(column.min(), rel=1e-4)
        assert fields["value_ratio_raw"] == whole[b, h, s]["value_ratio_raw"]
        assert fields["update_norm"] != whole[b, h, s]["update_norm"]


def test_a_new_statistic_is_one_function_and_one_row(monkeypatch):
    """What the table lists is computed for every sink of a call."""

    def half(sinks: sink_fields.Sinks) -> torch.Tensor:
        return sinks.received / 2

    case = planted(0)
    monkeypatch.setitem(SINK_FIELDS, "half", half)
    fields = measured(case, record_of(case)).fields
    assert torch.equal(fields["half"], fields["received"] / 2) and len(fields["half"])


def test_a_call_without_sinks_has_empty_columns():
    strict = replace(sw.Rules(), causal=sw.MeanRule(threshold=2.0))
    found = sw.scan(Planted([[0, 1]]), [tokens(2, 41, {0: [0]})], rules=strict)
    assert len(found.events) == 0 and found.events.schema == pl.Schema(EVENT_SCHEMA)
    assert np.isfinite(found.layers["received_first"].to_numpy()).all()
