"""Follow attention scores through a model's own operations: product, softmax, product.

A product's result is tagged with its operands. Elementwise and shape operations carry the tag and
note what they do to the scores (scale, bias, softcap, sink logit); a softmax turns it into weights;
the product that consumes the weights is the attention call.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

HIDDEN = -1e4
"""Fill values at or below this hide a key (float16 models use the smaller of their lowest)."""


@dataclass(frozen=True, eq=False)
class Scores:
    """softmax-to-be: cap(q k^T * scale) + bias, as far as it could be followed."""

    q: Tensor
    k: Tensor
    scale: float = 1.0
    softcap: float | None = None
    capped: bool = False
    bias: Tensor | None = None
    sink: Tensor | None = None
    faithful: bool = True
    """False once an operation did something that these fields cannot say."""


@dataclass(frozen=True, eq=False)
class Weights:
    """A softmax's result: the attention map."""

    scores: Scores
    lead: tuple[int, ...]
    """The shape before query and key when the softmax ran: batch and heads."""


class Tags:
    """Tags of living tensors; a tag goes with its tensor and never keeps it alive."""

    def __init__(self) -> None:
        self._tags: dict[int, tuple[weakref.ref, Scores | Weights]] = {}

    def __getitem__(self, tensor: object) -> Scores | Weights | None:
        entry = self._tags.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def __setitem__(self, tensor: Tensor, tag: Scores | Weights) -> None:
        key = id(tensor)
        ref = weakref.ref(tensor, lambda gone: self._drop(key, gone))
        self._tags[key] = (ref, tag)

    def _drop(self, key: int, gone: weakref.ref) -> None:
        entry = self._tags.get(key)
        if entry is not None and entry[0] is gone:
            del self._tags[key]

    def clear(self) -> None:
        """Forget everything."""
        self._tags.clear()


def product(name: str, args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, dict] | None:
    """The operands of a product as (left [.. m c], right [.. c n], state), or None."""
    if name in ("matmul", "bmm", "__matmul__") and len(args) == 2:
        left, right = args
        return (left, right, {}) if min(left.dim(), right.dim()) >= 2 else None
    if name == "__rmatmul__":
        return (args[1], args[0], {})
    if name == "baddbmm":
        operands = (*args[1:], *(kwargs[key] for key in ("batch1", "batch2") if key in kwargs))
        beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
        bias = None if beta == 0 else (args[0] if beta == 1 else args[0] * beta)
        return (*operands, {"scale": float(alpha), "bias": bias})
    return None


def einsum(args: tuple) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]] | None:
    """A two-operand einsum as a matrix product: left [.. m c], right [.. c n], and how its result
    is laid out as [.. m n]. None where it is no such product.
    """
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
    left = args[1].permute([one.index(c) for c in [*batch, *rows, *summed]])
    right = args[2].permute([two.index(c) for c in [*batch, *summed, *cols]])
    order = [result.index(c) for c in [*batch, *rows, *cols]]
    return left, right, lambda tensor: tensor.permute(order)


_SAME = {
    "to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone",
    "detach", "dropout", "dropout_", "alpha_dropout", "nan_to_num", "requires_grad_",
}  # fmt: skip
_SHAPE = {"view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "view_as", "expand"}
_ADD = {"add", "add_", "__add__", "__radd__", "__iadd__"}
_SUB = {"sub", "sub_", "__sub__", "__isub__"}
_MUL = {"mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply"}
_DIV = {"div", "div_", "__truediv__", "__itruediv__", "true_divide", "divide"}


def follow(
    tags: Tags, name: str, args: tuple, kwargs: dict[str, Any], result: Tensor
) -> Scores | Weights | None:
    """The tag of `result`, where the operation `name` carries one of its arguments' tags on."""
    if name == "where" and len(args) == 3:
        keep, source, fill = args
        if tags[keep] is not None:  # x.where(condition, other)
            source, keep = keep, source
        tag = tags[source]
        return _filled(tag, keep, fill, source) if isinstance(tag, Scores) else tag
    if name in ("cat", "concat", "concatenate"):
        return _with_sink(tags, args, kwargs)
    source = args[0] if args else None
    tag = tags[source]
    other = args[1] if len(args) > 1 else kwargs.get("other")
    if tag is None and name in _ADD | _MUL and isinstance(other, Tensor):
        source, other, tag = other, args[0], tags[other]
    if tag is None:
        return None
    assert isinstance(source, Tensor)
    if name in _SAME:
        return tag
    if name == "softmax" and isinstance(tag, Scores):
        dim = kwargs.get("dim", other)
        return Weights(tag, tuple(result.shape[:-2])) if dim in (-1, result.dim() - 1) else None
    if isinstance(tag, Weights):
        carried = _SHAPE | _MUL | {"masked_fill", "masked_fill_", "__getitem__", "narrow"}
        return tag if name in carried and result.shape[-2:-1] == source.shape[-2:-1] else None
    if name in _SHAPE:
        if tag.bias is None:
            return tag
        return replace(tag, bias=tag.bias.expand(source.shape).reshape(result.shape))
    if name in ("masked_fill", "masked_fill_"):
        keep = kwargs.get("mask", other)
        fill = kwargs.get("value", args[2] if len(args) > 2 else None)
        assert isinstance(keep, Tensor)
        return _filled(tag, ~keep.bool(), fill, source)
    if name in _ADD:
        return _plus(tag, other, kwargs.get("alpha", 1))
    if name in _SUB:
        return _plus(tag, other, -kwargs.get("alpha", 1))
    if name in _MUL | _DIV:
        factor = _number(other)
        if factor is None:
            return replace(tag, faithful=False)
        return _times(tag, factor if name in _MUL else 1.0 / factor)
    if name in ("tanh", "tanh_"):
        known = tag.bias is None and tag.sink is None and tag.softcap is None
        return replace(tag, softcap=1.0, capped=True, faithful=tag.faithful and known)
    if name in ("max", "maximum", "clamp", "clamp_", "clip") and result.shape == source.shape:
        return tag
    return None


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) else None


def _times(tag: Scores, factor: float) -> Scores:
    bias = None if tag.bias is None else tag.bias * factor
    if not tag.capped:
        return replace(tag, scale=tag.scale * factor, bias=bias)
    # cap * tanh(scale * qk): the softcap's inner division is part of the scale.
    assert tag.softcap is not None
    cap = tag.softcap * factor
    return replace(tag, softcap=cap, scale=tag.scale * factor, bias=bias)


def _plus(tag: Scores, other: Any, sign: float) -> Scores:
    if not isinstance(other, Tensor):
        return tag  # a constant moves every score alike: softmax does not see it
    if other.dim() and other.shape[-1] == 1:
        return tag  # one value a row: the same
    other = other if sign == 1 else other * sign
    return replace(tag, bias=other if tag.bias is None else tag.bias + other)


def _filled(tag: Scores, keep: Any, fill: Any, source: Tensor) -> Scores:
    """Scores kept where `keep`, hidden elsewhere."""
    value = _number(fill)
    if value is None or value > HIDDEN or not isinstance(keep, Tensor):
        return replace(tag, faithful=False)
    bias = tag.bias
    if bias is None:
        bias = torch.zeros((), dtype=source.dtype, device=source.device)
    keep = keep.to(torch.bool)
    if keep.dim() < source.dim():
        keep = keep.reshape((1,) * (source.dim() - keep.dim()) + tuple(keep.shape))
    return replace(tag, bias=torch.where(keep, bias, -torch.inf))


def _with_sink(tags: Tags, args: tuple, kwargs: dict[str, Any]) -> Scores | None:
    """Scores with one more column that holds a sink logit."""
    parts = args[0] if args else kwargs.get("tensors", ())
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if len(parts) != 2 or parts[0].dim() == 0 or dim not in (-1, parts[0].dim() - 1):
        return None
    tag = tags[parts[0]]
    if not isinstance(tag, Scores) or parts[1].shape[-1] != 1:
        return None
    return replace(tag, sink=parts[1][..., 0])
