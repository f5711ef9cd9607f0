"""Axis orders: which axis of [.. row col] each axis of a tensor is; None for that very layout."""

from typing import Any

from torch import Tensor

from sinkwise.interception import op_names

Order = tuple[int, ...]


def transposed(dims: int) -> Order:
    """The order of [.. col row]."""
    return (*range(dims - 2), dims - 1, dims - 2)


def compose(order: Order | None, dims: Order) -> Order | None:
    """The order after a tensor of the given order was permuted by `dims`."""
    new = dims if order is None else tuple(order[d] for d in dims)
    return None if new == tuple(range(len(new))) else new


def permutation(
    name: str, args: tuple, kwargs: dict[str, Any], source: Tensor, result: Tensor
) -> Order | None:
    """Which axis of `source` each axis of `result` is, where the function `name` permutes them."""
    count = source.dim()
    if name == "permute":
        dims = kwargs.get("dims", args[1] if len(args) == 2 else args[1:])
        return tuple(d % count for d in dims)
    if name in op_names.SWAP:
        first, second = [*args[1:], *kwargs.values()][:2]
        order = list(range(count))
        order[first], order[second] = order[second], order[first]
        return tuple(order)
    if name == op_names.PROPERTY and count >= 2 and result.dim() == count:  # the property mT
        view = source.transpose(-2, -1)
        if (result.shape, result.stride()) == (view.shape, view.stride()):
            return transposed(count)
    return None
