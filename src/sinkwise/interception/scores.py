"""What is known of a tensor between the two products of an attention: its scores, then its map."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sinkwise.interception.axes import Order, compose, transposed

MASKED = -1e4
"""Fill values at or below this mask a key (float16 models fill with the lowest float16)."""


@dataclass(frozen=True, eq=False)
class Scores:
    """cap(q k^T * scale) + bias: what a softmax will be taken of, as far as it could be traced."""

    q: Tensor
    k: Tensor
    scale: float = 1.0
    softcap: float | None = None
    capped: bool = False
    bias: Tensor | None = None
    sink: Tensor | None = None
    faithful: bool = True
    """False once an operation did something that these fields cannot express."""
    order: Order | None = None
    """The axis order of the traced tensor; None where it is [.. query key]."""

    def unfaithful(self) -> "Scores":
        """The same, after an operation that the fields cannot express."""
        return replace(self, faithful=False)

    def times(self, factor: Tensor | float | int, shape: torch.Size) -> "Scores":
        """After a multiplication; `shape` is that of the scores."""
        value = number(factor)
        bias = None if self.bias is None else self.bias * factor
        if value is None:
            assert isinstance(factor, Tensor)
            # One factor per head or per query (a learned temperature) becomes part of the query.
            rows = tuple(shape[:-1])
            same = torch.Size(rows).numel() == self.q.shape[:-1].numel()
            if self.capped or factor.shape[-1] != 1 or not same:
                return self.unfaithful()
            each = factor.expand(*rows, 1).reshape(*self.q.shape[:-1], 1)
            return replace(self, q=self.q * each, bias=bias)
        if not self.capped:
            return replace(self, scale=self.scale * value, bias=bias)
        # cap * tanh(scale * qk): the softcap's inner division is part of the scale.
        assert self.softcap is not None
        return replace(self, softcap=self.softcap * value, scale=self.scale * value, bias=bias)

    def plus(self, other: Tensor | float, sign: float | int) -> "Scores":
        """After adding `sign` times `other`."""
        if not isinstance(other, Tensor) or other.numel() == 1 or other.shape[-1] == 1:
            return self  # one value per row shifts the whole row, which softmax ignores
        other = other if sign == 1 else other * sign
        return replace(self, bias=other if self.bias is None else self.bias + other)

    def capped_by_tanh(self) -> "Scores":
        """After a tanh: a softcap of 1, which a later multiplication sets."""
        known = self.bias is None and self.sink is None and self.softcap is None
        return replace(self, softcap=1.0, capped=True, faithful=self.faithful and known)

    def masked(self, keep: Any, fill: Any, scores: Tensor) -> "Scores":
        """After setting `scores` to `fill` wherever `keep` is False."""
        value = number(fill)
        if value is None or value > MASKED or not isinstance(keep, Tensor):
            return self.unfaithful()
        bias = self.bias
        if bias is None:
            bias = torch.zeros((), dtype=scores.dtype, device=scores.device)
        keep = keep.to(torch.bool)
        if keep.dim() < scores.dim():
            keep = keep.reshape((1,) * (scores.dim() - keep.dim()) + tuple(keep.shape))
        return replace(self, bias=torch.where(keep, bias, -torch.inf))

    def normalised(self, dim: Any, result: Tensor) -> "Weights | None":
        """The map that a softmax over `dim` makes of the scores, or None where it is none."""
        count = result.dim()
        if not isinstance(dim, int):
            return None
        order = tuple(range(count)) if self.order is None else self.order
        axis, scores = order[dim % count], self
        if axis == count - 2 and self.sink is None:  # k q^T, normalised over its rows
            bias = self.bias if self.bias is None or self.bias.dim() < 2 else self.bias.mT
            faithful = self.faithful and (bias is None or bias.dim() >= 2)
            scores = replace(self, q=self.k, k=self.q, bias=bias, faithful=faithful)
            swap = transposed(count)
            order = tuple(swap[a] for a in order)
        elif axis != count - 1:
            return None
        lead = tuple(result.shape[order.index(a)] for a in range(count - 2))
        return Weights(scores, lead, order=compose(None, order))


@dataclass(frozen=True, eq=False)
class Weights:
    """A softmax's result: the attention map."""

    scores: Scores
    lead: tuple[int, ...]
    """The shape before query and key when the softmax ran: batch and heads."""
    faithful: bool = True
    """False once the map was changed after its softmax."""
    dropped: bool = False
    """True once dropout changed the map."""
    order: Order | None = None

    def unfaithful(self) -> "Weights":
        """The same, after the map was changed."""
        return replace(self, faithful=False)

    def has_layout(self, axes: Order | None, *, key_first: bool) -> bool:
        """Whether permuting the tensor by `axes` gives [.. query key], or [.. key query]."""
        order = self.order if axes is None else compose(self.order, axes)
        return order == (transposed(len(self.lead) + 2) if key_first else None)


def number(value: Any) -> float | None:
    """A number, or a tensor of one entry, as a float; else None."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) else None
