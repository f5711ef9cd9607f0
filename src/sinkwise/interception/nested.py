"""What modules take and return: tensors in tuples and dicts."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def leaves(value: Any) -> Iterator[Any]:
    """Everything in nested tuples, lists and dicts that is not itself one of them, in order."""
    if isinstance(value, tuple | list):
        for part in value:
            yield from leaves(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from leaves(part)
    else:
        yield value


def is_residual_stream(value: object) -> bool:
    """Whether it can be a residual stream: floating, with a batch, a token and a further axis."""
    return isinstance(value, Tensor) and value.dim() >= 3 and value.is_floating_point()
