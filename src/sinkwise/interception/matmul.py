"""Matrix products in all the forms that models use: matmul, bmm, baddbmm, einsum."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Product(NamedTuple):
    """result = left @ right: left [.. row inner], right [.. inner col]."""

    left: Tensor
    right: Tensor
    operands: tuple[Tensor, Tensor]
    """The tensors themselves, as the model passed them."""
    axes: tuple[tuple[int, ...] | None, tuple[int, ...] | None] = (None, None)
    """The permutations of an einsum's operands that make them `left` and `right`."""
    permutation: tuple[int, ...] | None = None
    """The permutation of an einsum's result that makes it [.. row col]."""
    bias: Tensor | None = None
    alpha: float = 1.0

    def laid_out(self, result: Tensor) -> Tensor:
        """The result as [.. row col]."""
        return result if self.permutation is None else result.permute(self.permutation)

    @property
    def result_order(self) -> tuple[int, ...] | None:
        """Which axis of [.. row col] each axis of the result is; None where it has that layout."""
        axes = self.permutation
        if axes is None or axes == tuple(range(len(axes))):
            return None
        return tuple(axes.index(axis) for axis in range(len(axes)))


def product(name: str, args: tuple, kwargs: dict[str, Any]) -> Product | None:
    """The product that the torch function `name` computes from its arguments, or None."""
    if name in ("matmul", "bmm", "__matmul__"):
        operands = (*args, *(kwargs[key] for key in ("input", "other", "mat2") if key in kwargs))
        return _plain(*operands) if len(operands) == 2 else None
    if name == "__rmatmul__":
        return _plain(args[1], args[0])
    if name == "baddbmm":
        left, right = (*args[1:], *(kwargs[key] for key in ("batch1", "batch2") if key in kwargs))
        beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
        bias = None if beta == 0 else (args[0] if beta == 1 else args[0] * beta)
        return Product(left, right, (left, right), bias=bias, alpha=float(alpha))
    return _einsum(args) if name == "einsum" else None


def _plain(left: Tensor, right: Tensor) -> Product | None:
    if min(left.dim(), right.dim()) < 2:
        return None
    return Product(left, right, (left, right))


def _einsum(args: tuple) -> Product | None:
    """A two-operand einsum as a matrix product, or None where it is none."""
    if len(args) == 2 and isinstance(args[1], list | tuple):
        args = (args[0], *args[1])
    if len(args) != 3 or not isinstance(args[0], str) or "->" not in args[0] or "." in args[0]:
        return None
    terms, result = args[0].replace(" ", "").split("->")
    if terms.count(",") != 1:
        return None
    one, two = terms.split(",")
    summed = [c for c in one if c in two and c not in result]
    batch = [c for c in result if c in one and c in two]
    rows = [c for c in one if c in result and c not in two]
    cols = [c for c in two if c in result and c not in one]
    if not (len(summed) == len(rows) == len(cols) == 1) or len(result) != len(batch) + 2:
        return None
    first = tuple(one.index(c) for c in [*batch, *rows, *summed])
    second = tuple(two.index(c) for c in [*batch, *summed, *cols])
    return Product(
        args[1].permute(first),
        args[2].permute(second),
        (args[1], args[2]),
        axes=(first, second),
        permutation=tuple(result.index(c) for c in [*batch, *rows, *cols]),
    )


def storage(tensor: Tensor) -> int:
    """The address of a tensor's storage, the same for all its views; 0 where it has none."""
    dense = tensor.layout == torch.strided and not tensor.is_nested
    return tensor.untyped_storage().data_ptr() if dense else 0
