"""What the checks share: a failed condition, the location of a record, comparisons of tensors."""

import torch
from torch import Tensor

from sinkwise.conformance.errors import ConformanceError
from sinkwise.core.records import AttentionRecord


def require(condition: bool | Tensor, message: str) -> None:
    """Raise ConformanceError unless the condition holds."""
    if not bool(condition):
        raise ConformanceError(message)


def location(record: AttentionRecord) -> str:
    """Where a record comes from, for messages."""
    return f"{record.name or 'the model'} (layer {record.layer}, call {record.call})"


def largest(values: Tensor) -> float:
    """The largest value, or 0 if there is none."""
    return float(values.max()) if values.numel() else 0.0


def sees_a_key(record: AttentionRecord, weights: Tensor) -> Tensor:
    """Whether each query sees a key: kernels differ in their output for the others."""
    return weights.sum(dim=-1) > 0 if record.sink_logit is None else weights.isfinite().all(dim=-1)


def same_bits(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether two lists of tensors are equal bit for bit (NaN equals NaN)."""
    return len(one) == len(other) and all(
        torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(one, other, strict=True)
    )
