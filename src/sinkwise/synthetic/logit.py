"""The sink logit in a minimal example: the effect of one more term in the softmax's denominator."""

from dataclasses import dataclass

import torch

from sinkwise.attention.reference import attention

SCORES = (0.1, -0.2, 0.0, 0.2, -0.1, 0.0)
"""Scores of a query that matches none of six tokens."""
VALUE_SEED = 0
"""Seed of the six values, which have width 4."""


@dataclass(frozen=True)
class LogitPoint:
    """The output of a head with one sink logit."""

    sink_logit: float | None
    weight_sum: float
    """Sum of the attention weights of the tokens, 0 to 1."""
    sink_share: float
    r"""Share of the sink, 0 to 1: $e^s / (\sum_j e^{s_j} + e^s)$ with the sink logit $s$."""
    output_norm: float
    """Norm of the head's output."""


def sink_logit_point(sink_logit: float | None) -> LogitPoint:
    r"""One query that matches none of six tokens with random values, with or without a sink logit.

    A sink logit $s$ adds $e^s$ to the softmax's denominator and has no value. Without it the head
    writes an average of values that it does not need; with it, less:

    >>> plain, sunk = sink_logit_point(None), sink_logit_point(3.0)
    >>> f"{plain.weight_sum:.2f} {plain.output_norm:.2f}"
    '1.00 0.83'
    >>> f"{sunk.sink_share:.0%} {sunk.output_norm:.2f}"
    '77% 0.19'

    Reference: OpenAI, 2025, gpt-oss (one learned logit per head); a logit of 0 is softmax-one.
    """
    generator = torch.Generator().manual_seed(VALUE_SEED)
    values = torch.randn(len(SCORES), 4, generator=generator)[None, None]
    # Keys of width 1 that equal their scores, and a query of 1.
    keys = torch.tensor(SCORES)[None, None, :, None]
    logit = None if sink_logit is None else torch.full((1, 1, 1), sink_logit)
    out = attention(torch.ones(1, 1, 1, 1), keys, values, scale=1.0, sink_logit=logit)
    total = float(out.weights.sum())
    return LogitPoint(
        sink_logit, total, 1.0 - total if logit is not None else 0.0, float(out.out.norm())
    )
