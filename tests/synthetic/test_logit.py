"""The sink logit's example: its numbers, and both exact forms."""

import doctest
import math

import pytest
import torch

import sinkwise.synthetic.logit
from sinkwise.synthetic.logit import SCORES, sink_logit_point


def test_docstring():
    found = doctest.testmod(sinkwise.synthetic.logit)
    assert found.attempted == 3 and found.failed == 0


@pytest.mark.parametrize("logit", [None, -1e4, -2.0, 0.0, 3.0, 100.0])
def test_closed_form(logit):
    point = sink_logit_point(logit)
    torch.manual_seed(0)
    values = torch.randn(6, 4).double()
    exps = torch.tensor([math.exp(score) for score in SCORES], dtype=torch.float64)
    if logit == 100.0:
        assert point.output_norm == pytest.approx(0.0, abs=1e-12) and point.sink_share == 1.0
        return
    sink = 0.0 if logit is None else math.exp(logit)
    weights = exps / (exps.sum() + sink)
    assert point.weight_sum == pytest.approx(float(weights.sum()), abs=1e-6)
    assert point.sink_share == pytest.approx(1 - float(weights.sum()), abs=1e-6)
    assert point.output_norm == pytest.approx(float((weights @ values).norm()), abs=1e-6)
    lse = float(exps.log().logsumexp(0))
    gate = 1.0 if logit is None else 1 / (1 + math.exp(min(logit - lse, 700.0)))
    plain = sink_logit_point(None).output_norm
    assert point.output_norm == pytest.approx(plain * gate, abs=1e-6)
