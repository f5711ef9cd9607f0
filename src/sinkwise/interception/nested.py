"""What modules are given and return: tensors in tuples and dicts."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def leaves(value: Any) -> Iterator[Any]:
    """Everything in nested tuples, lists and dicts that is none of them, in order."""
    if isinstance(value, tuple | list):
        for part in value:
            yield from leaves(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from leaves(part)
    else:
        yield value


def is_stream(value: object) -> bool:
    """Whether it can be a residual stream: batch, token and at least one more axis, floating."""
    return isinstance(value, Tensor) and value.dim() >= 3 and value.is_floating_point()
