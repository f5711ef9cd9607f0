"""The sink logit in one screen: what one more term in the softmax's denominator does."""

from dataclasses import dataclass

import torch

from sinkwise.attention.reference import attention

SCORES = (0.1, -0.2, 0.0, 0.2, -0.1, 0.0)
"""Scores of a query that matches none of six tokens."""
VALUE_SEED = 0
"""Seed of the six values, of width 4."""


@dataclass(frozen=True)
class LogitPoint:
    """What a head writes with one sink logit."""

    sink_logit: float | None
    weight_sum: float
    """Sum of the weights of the tokens, 0 to 1."""
    sink_share: float
    """What the sink takes, 0 to 1: exp(sink) / (sum_j exp(s_j) + exp(sink))."""
    output_norm: float
    """Length of the head's output."""


def sink_logit_point(sink_logit: float | None) -> LogitPoint:
    """One query over six random values that it does not need, with a sink logit or without one.

    A sink logit joins the softmax's denominator and carries no value, so the head can write less
    than an average of what it does not need:

    >>> plain, sunk = sink_logit_point(None), sink_logit_point(3.0)
    >>> f"{plain.weight_sum:.2f} {plain.output_norm:.2f}"
    '1.00 0.83'
    >>> f"{sunk.sink_share:.0%} {sunk.output_norm:.2f}"
    '77% 0.19'

    Reference: OpenAI, 2025, gpt-oss (one learned logit a head); a logit of 0 is softmax-one.
    """
    generator = torch.Generator().manual_seed(VALUE_SEED)
    values = torch.randn(len(SCORES), 4, generator=generator)[None, None]
    # A key of width 1 that holds its score, and a query of 1.
    keys = torch.tensor(SCORES)[None, None, :, None]
    logit = None if sink_logit is None else torch.full((1, 1, 1), sink_logit)
    out = attention(torch.ones(1, 1, 1, 1), keys, values, scale=1.0, sink_logit=logit)
    total = float(out.weights.sum())
    return LogitPoint(
        sink_logit, total, 1.0 - total if logit is not None else 0.0, float(out.out.norm())
    )
