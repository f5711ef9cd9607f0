"""Perplexity, its curve and paired ratios, by hand."""

import math

import pytest

from sinkwise.streaming.comparison.compare import curve, gap, perplexity
from sinkwise.streaming.comparison.methods import Method
from sinkwise.streaming.comparison.scoring import MethodRun


def test_gap_is_that_of_the_tokens_that_both_scored() -> None:
    one = MethodRun(Method("sinks", 2, 1), [1, 2, 3, 5], [9.0, 1.0, 2.0, 4.0], 0)
    other = MethodRun(Method("recompute", 2), [1, 2, 3, 4], [0.0, 0.5, 1.0, 1.0], 0)
    found = gap(one, other)  # differences 0.5 and 1: token 1 is before the cache is full
    assert found.tokens == 2
    assert found.ratio == pytest.approx(math.exp(0.75))
    assert found.standard_error == pytest.approx(math.exp(0.75) * math.sqrt(0.125) / math.sqrt(2))
    assert math.isnan(gap(one, MethodRun(other.method, [3], [1.0], 0)).ratio)


def test_perplexity_is_the_exponential_of_the_mean() -> None:
    one = MethodRun(Method("dense", 4), [1, 2, 3, 4], [math.log(2), math.log(8), 0.0, 0.0], 0)
    assert perplexity(one, 1, 3) == pytest.approx(4.0)
    assert math.isnan(perplexity(one, 9, 12))
    assert list(curve(one, 2)) == [(1, pytest.approx(2.0)), (3, pytest.approx(8**0.5)), (5, 1.0)]
