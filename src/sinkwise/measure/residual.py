"""The residual stream before and after a block: token norms, massive activations, similarity."""

import weakref
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkwise.attention.tiles import statistics_dtype

MASSIVE = 100.0
"""A massive activation has a magnitude above this,"""
MASSIVE_TIMES_MEDIAN = 1000.0
"""and at least this many times the median magnitude of its sample."""


@dataclass(eq=False)
class ResidualStatistics:
    """Statistics of one state of the residual stream, per sample and without padding."""

    norm: Float[Tensor, "batch query"]
    """Euclidean norm of each token; NaN for padding."""
    median: Float[Tensor, " batch"]
    """Median over the sample's tokens of their norm."""
    similarity: Float[Tensor, " batch"]
    """Mean pairwise cosine of the sample's tokens, -1 to 1; NaN with fewer than two tokens."""
    largest: Float[Tensor, " batch"]
    """Largest magnitude of an activation."""
    largest_token: Int[Tensor, " batch"]
    """Position of its token,"""
    largest_dim: Int[Tensor, " batch"]
    """and its channel."""
    massive: Int[Tensor, " batch"]
    """Number of massive activations."""


def residual_statistics(
    x: Float[Tensor, "batch query dim"], real: Bool[Tensor, "batch query"] | None
) -> ResidualStatistics:
    """Measure a state of the residual stream in float32 or better; `real` is False for padding.

    similarity = (|sum_j x_j/|x_j||^2 - n) / (n (n - 1)), without an n x n matrix (a zero token has
    cosine 0 with every other, so it is not among the n that are subtracted). An activation is
    massive if its magnitude is > 100 and >= 1000 times the sample's median magnitude.

    Reference: Sun et al., "Massive Activations in Large Language Models", 2024, arXiv 2402.17762.
    """
    x = x.to(statistics_dtype(x))
    norm = torch.linalg.vector_norm(x, dim=-1)
    inverse = 1.0 / norm.clamp_min(torch.finfo(x.dtype).tiny)
    count = torch.full((x.shape[0],), float(x.shape[1]), dtype=x.dtype, device=x.device)
    if real is not None:
        norm = norm.masked_fill(~real, torch.nan)
        x = x.masked_fill(~real[..., None], 0.0)
        inverse = inverse.masked_fill(~real, 0.0)
        count = real.sum(dim=-1).to(x.dtype)
    total = torch.bmm(inverse[:, None, :], x)[:, 0]
    pairs = count * (count - 1)
    own = (norm * inverse).square().nansum(dim=-1)
    similarity = (total.square().sum(dim=-1) - own) / pairs.masked_fill(pairs == 0, torch.nan)
    largest, position = _largest(x)
    massive = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
    # The median is only needed where some activation is large enough.
    for sample in torch.nonzero(largest > MASSIVE)[:, 0].tolist():
        values = x[sample].abs() if real is None else x[sample][real[sample]].abs()
        limit = max(MASSIVE, MASSIVE_TIMES_MEDIAN * float(values.median()))
        massive[sample] = int(((values > MASSIVE) & (values >= limit)).sum())
    return ResidualStatistics(
        norm=norm,
        median=norm.nanmedian(dim=-1).values,
        similarity=similarity,
        largest=largest,
        largest_token=position // x.shape[2],
        largest_dim=position % x.shape[2],
        massive=massive,
    )


def _largest(x: Tensor) -> tuple[Tensor, Tensor]:
    """Largest magnitude in each sample and its flat index, without a copy of x."""
    flat = x.flatten(1)
    high, low = flat.max(dim=-1), flat.min(dim=-1)
    negative = -low.values > high.values
    return torch.where(negative, -low.values, high.values), torch.where(
        negative, low.indices, high.indices
    )


class ResidualCache:
    """Statistics of the last two states: a block's output is the next block's input."""

    def __init__(self) -> None:
        self._entries: list[tuple[weakref.ref, int, ResidualStatistics]] = []

    def statistics(self, x: Tensor, real: Tensor | None) -> ResidualStatistics:
        """Statistics of x, measured once per tensor and version of it."""
        for ref, version, known in self._entries:
            if ref() is x and version == _version(x):
                return known
        flat = x.flatten(1, -2)
        if real is not None and real.shape != flat.shape[:2]:
            real = None
        measured = residual_statistics(flat, real)
        self._entries = [(weakref.ref(x), _version(x), measured), *self._entries[:1]]
        return measured


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version
