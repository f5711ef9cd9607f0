"""The perplexity of a run, along the text and relative to another run."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, isnan, sqrt
from statistics import fmean, stdev

import torch

from sinkwise.streaming.comparison.scoring import MethodRun


def perplexity(one: MethodRun, start: int, stop: int) -> float:
    """exp of the mean loss of the scored tokens start ≤ t < stop; NaN if there are none.

    From 1 (certain) to about the vocabulary's size (a uniform guess).
    """
    pairs = zip(one.positions, one.losses, strict=True)
    chosen = [loss for position, loss in pairs if start <= position < stop]
    if not chosen:
        return float("nan")
    return float(torch.tensor(chosen, dtype=torch.float64).mean().exp())


def curve(one: MethodRun, width: int) -> Iterator[tuple[int, float]]:
    """(middle, perplexity) of consecutive stretches of `width` tokens."""
    for start in range(0, one.positions[-1] + 1, width):
        value = perplexity(one, start, start + width)
        if not isnan(value):
            yield start + width // 2, value


@dataclass(frozen=True)
class Gap:
    """How much worse one method is than another, on the tokens that both have scored."""

    ratio: float
    """Ratio of the perplexities: exp of the mean difference of the losses."""
    standard_error: float
    """Standard error of the ratio, assuming independent tokens."""
    tokens: int
    """Number of tokens that both have scored with a full cache."""


def gap(one: MethodRun, other: MethodRun) -> Gap:
    """The first over the second; NaN if they share fewer than two tokens."""
    theirs = dict(zip(other.positions, other.losses, strict=True))
    start = max(one.method.cache_length, other.method.cache_length)
    pairs = zip(one.positions, one.losses, strict=True)
    both = [loss - theirs[at] for at, loss in pairs if at >= start and at in theirs]
    if len(both) < 2:
        return Gap(float("nan"), float("nan"), len(both))
    ratio = exp(fmean(both))
    return Gap(ratio, ratio * stdev(both) / sqrt(len(both)), len(both))
