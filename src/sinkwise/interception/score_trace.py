"""Follow attention scores through a model's own operations: product, softmax, product.

A product's result is tagged with its operands. Elementwise and shape operations carry the tag and
note what they do to the scores (scale, bias, softcap, sink logit); a softmax turns it into weights;
the product that consumes the weights is the attention call.
"""

import weakref
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
    order: tuple[int, ...] | None = None
    """Where each axis of the tagged tensor comes from, if it is not laid out [.. query key]."""


@dataclass(frozen=True, eq=False)
class Weights:
    """A softmax's result: the attention map."""

    scores: Scores
    lead: tuple[int, ...]
    """The shape before query and key when the softmax ran: batch and heads."""
    faithful: bool = True
    """False once the map was changed after its softmax."""
    dropped: bool = False
    """True once dropout fell on the map."""
    order: tuple[int, ...] | None = None

    def laid_out(self, axes: tuple[int, ...] | None, *, turned: bool) -> bool:
        """Whether permuting the tensor by `axes` gives [.. query key], or [.. key query]."""
        order = self.order if axes is None else _composed(self.order, axes)
        return order == (_swapped(len(self.lead) + 2) if turned else None)


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

    def doubt(self, tensor: object) -> None:
        """Note that part of a tensor was overwritten."""
        tag = self[tensor]
        if tag is not None and isinstance(tensor, Tensor):
            self[tensor] = replace(tag, faithful=False)

    def _drop(self, key: int, gone: weakref.ref) -> None:
        entry = self._tags.get(key)
        if entry is not None and entry[0] is gone:
            del self._tags[key]

    def clear(self) -> None:
        """Forget everything."""
        self._tags.clear()


_DROPOUT = {"dropout", "dropout_", "alpha_dropout"}
_SAME = {
    "to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone",
    "detach", "nan_to_num", "requires_grad_", *_DROPOUT,
}  # fmt: skip
_SHAPE = {"view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "view_as", "expand"}
_SWAP = {"transpose", "swapaxes", "swapdims", "transpose_"}
_ADD = {"add", "add_", "__add__", "__radd__", "__iadd__"}
_SUB = {"sub", "sub_", "__sub__", "__isub__"}
_MUL = {"mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply"}
_DIV = {"div", "div_", "__truediv__", "__itruediv__", "true_divide", "divide"}
_FILL = {"masked_fill", "masked_fill_"}
_CLAMP = {"max", "min", "maximum", "minimum", "clamp", "clamp_", "clip"}
_PART = {"__getitem__", "narrow"}


def follow(
    tags: Tags, name: str, args: tuple, kwargs: dict[str, Any], result: Tensor
) -> Scores | Weights | None:
    """The tag of `result`, where the operation `name` carries one of its arguments' tags on.

    An unknown operation that keeps the shape keeps the tag too, no longer faithful.
    """
    if name == "where" and len(args) == 3:
        keep, source, fill = args
        if tags[keep] is not None:  # x.where(condition, other)
            source, keep = keep, source
        tag = tags[source]
        return _filled(tag, keep, fill, source) if isinstance(tag, Scores) else tag
    if name in ("cat", "concat", "concatenate"):
        return _with_sink(tags, args, kwargs)
    source = args[0] if args else kwargs.get("input")
    tag = tags[source]
    other = args[1] if len(args) > 1 else kwargs.get("other")
    if tag is None and name in _ADD | _MUL and isinstance(other, Tensor):
        source, other, tag = other, args[0], tags[other]
    if tag is None or name.endswith("_like") or name.startswith("new_"):
        return None
    assert isinstance(source, Tensor)
    dims = _axes(name, args, kwargs, source, result)
    if dims is not None:
        return replace(tag, order=_composed(tag.order, dims))
    if name == "softmax":
        dim = kwargs.get("dim", other)
        return _normalised(tag, dim, result) if isinstance(tag, Scores) else None
    if isinstance(tag, Weights):
        return _weights(tag, name, args, kwargs, source, result)
    return _scores(tag, name, args, kwargs, source, other, result)


def summed(tags: Tags, name: str, args: tuple, kwargs: dict[str, Any]) -> Scores | None:
    """The scores whose log-sum-exp over their keys was just taken, if that is what `name` did."""
    if name != "logsumexp":
        return None
    source, dim = [*args, *kwargs.values()][:2]
    tag = tags[source]
    last = dim in (-1, source.dim() - 1, (-1,), [-1])
    return tag if isinstance(tag, Scores) and tag.order is None and last else None


def _weights(
    tag: Weights, name: str, args: tuple, kwargs: dict[str, Any], source: Tensor, result: Tensor
) -> Weights | None:
    if name in _SAME:
        return replace(tag, dropped=tag.dropped or (name in _DROPOUT and _drops(args, kwargs)))
    if name in _SHAPE | _PART:
        kept = tag.order is None and result.shape[-2:-1] == source.shape[-2:-1]
        return tag if kept else None
    if result.shape != source.shape:
        return None
    return tag if name in _FILL else replace(tag, faithful=False)


def _scores(
    tag: Scores,
    name: str,
    args: tuple,
    kwargs: dict[str, Any],
    source: Tensor,
    other: Any,
    result: Tensor,
) -> Scores | None:
    if name in _SAME:
        return tag
    if name in _SHAPE:
        if tag.order is not None:
            return None
        if tag.bias is None:
            return tag
        return replace(tag, bias=tag.bias.expand(source.shape).reshape(result.shape))
    if result.shape != source.shape:
        return None
    if tag.order is not None and _number(other) is None:
        return replace(tag, faithful=False)
    if name in _FILL:
        keep = kwargs.get("mask", other)
        fill = kwargs.get("value", args[2] if len(args) > 2 else None)
        return _filled(tag, ~keep.bool(), fill, source)
    if name in _ADD:
        return _plus(tag, other, kwargs.get("alpha", 1))
    if name in _SUB:
        return _plus(tag, other, -kwargs.get("alpha", 1))
    if name in _MUL | _DIV:
        return _times(tag, other if name in _MUL else 1.0 / other, source)
    if name in ("tanh", "tanh_"):
        known = tag.bias is None and tag.sink is None and tag.softcap is None
        return replace(tag, softcap=1.0, capped=True, faithful=tag.faithful and known)
    if name in _CLAMP and all(_is_far(bound) for bound in (*args[1:], *kwargs.values())):
        return tag
    return replace(tag, faithful=False)


def _drops(args: tuple, kwargs: dict[str, Any]) -> bool:
    probability = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", args[2] if len(args) > 2 else True)
    return bool(training and probability)


def _is_far(bound: Any) -> bool:
    """True for a bound that no real score reaches."""
    value = _number(bound)
    return bound is None or (value is not None and abs(value) >= -HIDDEN)


def _swapped(dims: int) -> tuple[int, ...]:
    return (*range(dims - 2), dims - 1, dims - 2)


def _axes(
    name: str, args: tuple, kwargs: dict[str, Any], source: Tensor, result: Tensor
) -> tuple[int, ...] | None:
    """Which axis of `source` each axis of `result` is, where `name` permutes them."""
    count = source.dim()
    if name == "permute":
        dims = kwargs.get("dims", args[1] if len(args) == 2 else args[1:])
        return tuple(d % count for d in dims)
    if name in _SWAP:
        first, second = [*args[1:], *kwargs.values()][:2]
        order = list(range(count))
        order[first], order[second] = order[second], order[first]
        return tuple(order)
    if name == "__get__" and count >= 2 and result.dim() == count:  # the property mT
        turned = source.transpose(-2, -1)
        if (result.shape, result.stride()) == (turned.shape, turned.stride()):
            return _swapped(count)
    return None


def _composed(order: tuple[int, ...] | None, dims: tuple[int, ...]) -> tuple[int, ...] | None:
    new = dims if order is None else tuple(order[d] for d in dims)
    return None if new == tuple(range(len(new))) else new


def _normalised(tag: Scores, dim: Any, result: Tensor) -> Weights | None:
    """The map that a softmax over `dim` makes of scores."""
    count = result.dim()
    if not isinstance(dim, int):
        return None
    order = tuple(range(count)) if tag.order is None else tag.order
    axis = order[dim % count]
    if axis == count - 2 and tag.sink is None:  # k q^T, normalised over its rows
        bias = tag.bias if tag.bias is None or tag.bias.dim() < 2 else tag.bias.mT
        faithful = tag.faithful and (bias is None or bias.dim() >= 2)
        tag = replace(tag, q=tag.k, k=tag.q, bias=bias, faithful=faithful)
        swap = _swapped(count)
        order = tuple(swap[a] for a in order)
    elif axis != count - 1:
        return None
    lead = tuple(result.shape[order.index(a)] for a in range(count - 2))
    return Weights(tag, lead, order=_composed(None, order))


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) else None


def _times(tag: Scores, factor: Tensor | float | int, source: Tensor) -> Scores:
    number = _number(factor)
    bias = None if tag.bias is None else tag.bias * factor
    if number is None:
        assert isinstance(factor, Tensor)
        # One factor a head or a query (a learned temperature) belongs to the query.
        rows = tuple(source.shape[:-1])
        same = torch.Size(rows).numel() == tag.q.shape[:-1].numel()
        if tag.capped or factor.shape[-1] != 1 or not same:
            return replace(tag, faithful=False)
        each = factor.expand(*rows, 1).reshape(*tag.q.shape[:-1], 1)
        return replace(tag, q=tag.q * each, bias=bias)
    if not tag.capped:
        return replace(tag, scale=tag.scale * number, bias=bias)
    # cap * tanh(scale * qk): the softcap's inner division is part of the scale.
    assert tag.softcap is not None
    return replace(tag, softcap=tag.softcap * number, scale=tag.scale * number, bias=bias)


def _plus(tag: Scores, other: Tensor | float, sign: float | int) -> Scores:
    if not isinstance(other, Tensor) or other.numel() == 1 or other.shape[-1] == 1:
        return tag  # one value a row moves its scores alike: softmax does not see it
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
    if not isinstance(tag, Scores) or tag.order is not None or parts[1].shape[-1] != 1:
        return None
    return replace(tag, sink=parts[1][..., 0])
