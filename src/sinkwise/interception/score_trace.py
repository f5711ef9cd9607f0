"""Trace attention scores through a model's own operations, from a product to a softmax.

A product's result is tagged with its operands. Elementwise and shape operations pass the tag on and
note what they do to the scores (scale, bias, softcap, sink logit); a softmax turns scores into
weights. The product that consumes the weights is the attention.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from sinkwise.interception import op_names as op
from sinkwise.interception.axes import compose, permutation
from sinkwise.interception.scores import MASKED, Scores, Weights, number
from sinkwise.interception.tensor_map import TensorMap


class ScoreTrace:
    """What is known of the scores and maps that are alive."""

    def __init__(self) -> None:
        self.tags: TensorMap[Scores | Weights] = TensorMap()

    def overwritten(self, tensor: object) -> None:
        """Part of a tensor was assigned to."""
        tag = self.tags.get(tensor)
        if tag is not None and isinstance(tensor, Tensor):
            self.tags[tensor] = tag.unfaithful()

    def follow(self, name: str, args: tuple, kwargs: dict[str, Any], result: Tensor) -> None:
        """Tag the result of the function `name`, where it passes on the tag of an argument.

        An unknown operation that keeps the shape keeps the tag too, no longer faithful.
        """
        tag = self._next(name, args, kwargs, result)
        if tag is not None:
            self.tags[result] = tag

    def summed(self, name: str, args: tuple, kwargs: dict[str, Any]) -> Scores | None:
        """The scores whose log-sum-exp over the keys `name` has just taken, or None."""
        if name not in op.LOGSUMEXP:
            return None
        source, dim = [*args, *kwargs.values()][:2]
        tag = self.tags.get(source)
        last = dim in (-1, source.dim() - 1, (-1,), [-1])
        return tag if isinstance(tag, Scores) and tag.order is None and last else None

    def _next(
        self, name: str, args: tuple, kwargs: dict[str, Any], result: Tensor
    ) -> Scores | Weights | None:
        tags = self.tags
        if name == "where" and len(args) == 3:
            keep, source, fill = args
            if tags.get(keep) is not None:  # x.where(condition, other)
                source, keep = keep, source
            tag = tags.get(source)
            return tag.masked(keep, fill, source) if isinstance(tag, Scores) else tag
        if name in op.CAT:
            return self._with_sink(args, kwargs)
        source = args[0] if args else kwargs.get("input")
        tag = tags.get(source)
        other = args[1] if len(args) > 1 else kwargs.get("other")
        if tag is None and isinstance(other, Tensor) and (name in op.ADD or name in op.MUL):
            source, other, tag = other, args[0], tags.get(other)
        if tag is None or name.endswith("_like") or name.startswith("new_"):
            return None
        assert isinstance(source, Tensor)
        dims = permutation(name, args, kwargs, source, result)
        if dims is not None:
            return replace(tag, order=compose(tag.order, dims))
        if name in op.SOFTMAX:
            dim = kwargs.get("dim", other)
            return tag.normalised(dim, result) if isinstance(tag, Scores) else None
        if isinstance(tag, Weights):
            return _weights(tag, name, args, kwargs, source, result)
        return _scores(tag, name, args, kwargs, source, other, result)

    def _with_sink(self, args: tuple, kwargs: dict[str, Any]) -> Scores | None:
        """Scores with one more column that holds a sink logit."""
        parts = args[0] if args else kwargs.get("tensors", ())
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        if len(parts) != 2 or parts[0].dim() == 0 or dim not in (-1, parts[0].dim() - 1):
            return None
        tag = self.tags.get(parts[0])
        if not isinstance(tag, Scores) or tag.order is not None or parts[1].shape[-1] != 1:
            return None
        return replace(tag, sink=parts[1][..., 0])


def _weights(
    tag: Weights, name: str, args: tuple, kwargs: dict[str, Any], source: Tensor, result: Tensor
) -> Weights | None:
    """The map after the function `name`."""
    if name in op.DROPOUT:
        return replace(tag, dropped=tag.dropped or _drops(args, kwargs))
    if name in op.COPY or name == "nan_to_num":
        return tag
    if name in op.RESHAPE or name in op.SLICE:
        kept = tag.order is None and result.shape[-2:-1] == source.shape[-2:-1]
        return tag if kept else None
    if result.shape != source.shape:
        return None
    return tag if name in op.FILL else tag.unfaithful()


def _scores(
    tag: Scores,
    name: str,
    args: tuple,
    kwargs: dict[str, Any],
    source: Tensor,
    other: Any,
    result: Tensor,
) -> Scores | None:
    """The scores after the function `name`."""
    if name in op.COPY or name in op.DROPOUT or name == "nan_to_num":
        return tag
    if name in op.RESHAPE:
        if tag.order is not None:
            return None
        if tag.bias is None:
            return tag
        bias = tag.bias.expand(source.shape)
        grows = name in ("expand", "expand_as")
        return replace(tag, bias=bias.expand(result.shape) if grows else bias.reshape(result.shape))
    if result.shape != source.shape:
        return None
    if tag.order is not None and number(other) is None:
        return tag.unfaithful()
    if name in op.FILL:
        masked = kwargs.get("mask", other)
        fill = kwargs.get("value", args[2] if len(args) > 2 else None)
        return tag.masked(~masked.bool(), fill, source)
    if name in op.ADD:
        return tag.plus(other, kwargs.get("alpha", 1))
    if name in op.SUB:
        return tag.plus(other, -kwargs.get("alpha", 1))
    if name in op.MUL:
        return tag.times(other, source.shape)
    if name in op.DIV and kwargs.get("rounding_mode") is None:
        return tag.times(1.0 / other, source.shape)
    if name in op.TANH:
        return tag.capped_by_tanh()
    if name in op.CLAMP and all(_is_far(bound) for bound in (*args[1:], *kwargs.values())):
        return tag
    return tag.unfaithful()


def _drops(args: tuple, kwargs: dict[str, Any]) -> bool:
    probability = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", args[2] if len(args) > 2 else True)
    return bool(training and probability)


def _is_far(bound: Any) -> bool:
    """True for a bound that no real score reaches."""
    value = number(bound)
    return bound is None or (value is not None and abs(value) >= -MASKED)
