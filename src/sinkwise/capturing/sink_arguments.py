"""Sink logits that a module owns, or passes to its kernel, and that the softmax may leave out."""

import re
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import NamedTuple

from torch import Tensor, nn

from sinkwise.errors import CaptureError
from sinkwise.hosts.implementation import has_effect, own_sink_logit
from sinkwise.interception.callers import callers

_PASSED = re.compile(r"s_aux|(\w*_)?sinks?(_logits?|_bias(es)?)?")
"""Arguments of an attention function, also inside its **kwargs."""
_VARKEYWORDS = 0x08


class Sink(NamedTuple):
    """A sink logit that a call should have."""

    name: str
    kernel: str
    eager: bool
    """Whether the model runs its own softmax already."""


def find(owner: nn.Module | None, heads: int) -> Sink | None:
    """The sink logit of the attention that `owner` is computing now, or None.

    Looked for among the module's parameters and layers, and in the arguments of each function
    between the module's own method and the kernel: an attention function may take `s_aux` (or
    `sinks` computed on the way) among its **kwargs and never use it.
    """
    frames = list(callers())
    if owner is None or not frames:
        return None
    name = own_sink_logit(owner, heads) or _passed(owner, frames, heads)
    if name is None:
        return None
    set_to = getattr(getattr(owner, "config", None), "_attn_implementation", None)
    kernel = f"attn_implementation={set_to!r}" if set_to else f"{frames[0].f_code.co_name}()"
    return Sink(name, kernel, set_to in (None, "eager"))


def error(sink: Sink, name: str, layer: int) -> CaptureError:
    """The error for a record whose softmax leaves `sink` out."""
    module = f"{name or 'the model'} (layer {layer})"
    if sink.eager:
        return CaptureError(
            f"{module}: the softmax of {sink.kernel} leaves out the sink logit {sink.name!r}; a "
            "sink that is one more column of the scores, or scales the output by "
            "sigmoid(lse - sink), can be captured"
        )
    return CaptureError(
        f"{module}: {sink.kernel} drops the sink logit {sink.name!r}, so that the model computes a "
        "different attention from its own; call model.set_attn_implementation('eager') first"
    )


def _passed(owner: nn.Module, frames: Iterable[FrameType], heads: int) -> str | None:
    """The argument that is a sink logit, of the functions up to the module's own method."""
    for frame in frames:
        names = frame.f_locals
        for name, value in {**names, **names.get(_varkeywords(frame.f_code), {})}.items():
            logit = _PASSED.fullmatch(name) and isinstance(value, Tensor) and has_effect(value)
            if logit and heads in (*value.shape, value.numel()):
                return name
        if names.get("self") is owner:
            return None
    return None


def _varkeywords(code: CodeType) -> str:
    """The name of a function's **kwargs, or ""."""
    if not code.co_flags & _VARKEYWORDS:
        return ""
    positional = code.co_argcount + code.co_kwonlyargcount
    return code.co_varnames[positional + bool(code.co_flags & 0x04)]
