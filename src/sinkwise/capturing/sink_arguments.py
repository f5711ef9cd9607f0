"""Sink logits that a module owns, or hands to its kernel, and that the softmax may leave out."""

import re
from types import CodeType, FrameType
from typing import NamedTuple

from torch import Tensor, nn

from sinkwise.errors import CaptureError
from sinkwise.hosts.implementation import has_effect, own_sink_logit

_HANDED = re.compile(r"s_aux|(\w*_)?sinks?(_logits?|_bias(es)?)?")
"""Arguments of an attention function, also inside its **kwargs."""
_VARKEYWORDS = 0x08


class Sink(NamedTuple):
    """A sink logit that a call should know."""

    name: str
    kernel: str
    eager: bool
    """Whether the model runs its own softmax already."""


def find(owner: nn.Module | None, frame: FrameType | None, heads: int) -> Sink | None:
    """The sink logit of the attention that `owner` computes by what runs in `frame`, or None.

    Looked for among the module's parameters and layers, and in what each function between the
    module's own method and the kernel was given: an attention function may take `s_aux` (or `sinks`
    computed on the way) among its **kwargs and never look at it.
    """
    while frame is not None and frame.f_globals.get("__name__", "").startswith("sinkwise."):
        frame = frame.f_back
    if owner is None or frame is None:
        return None
    name = own_sink_logit(owner, heads) or _handed(owner, frame, heads)
    if name is None:
        return None
    set_to = getattr(getattr(owner, "config", None), "_attn_implementation", None)
    kernel = f"attn_implementation={set_to!r}" if set_to else f"{frame.f_code.co_name}()"
    return Sink(name, kernel, set_to in (None, "eager"))


def error(sink: Sink, name: str, layer: int) -> CaptureError:
    """What to say of a record whose softmax leaves `sink` out, and the cure."""
    place = f"{name or 'the model'} (layer {layer})"
    if sink.eager:
        return CaptureError(
            f"{place}: the softmax of {sink.kernel} leaves out the sink logit {sink.name!r}; a "
            "sink that is one more column of the scores, or scales the output by "
            "sigmoid(lse - sink), can be captured"
        )
    return CaptureError(
        f"{place}: {sink.kernel} drops the sink logit {sink.name!r}: the model computes another "
        "attention than its own; call model.set_attn_implementation('eager') first"
    )


def _handed(owner: nn.Module, frame: FrameType | None, heads: int) -> str | None:
    while frame is not None:
        names = frame.f_locals
        for name, value in {**names, **names.get(_varkeywords(frame.f_code), {})}.items():
            logit = _HANDED.fullmatch(name) and isinstance(value, Tensor) and has_effect(value)
            if logit and heads in (*value.shape, value.numel()):
                return name
        if names.get("self") is owner:
            return None
        frame = frame.f_back
    return None


def _varkeywords(code: CodeType) -> str:
    """The name of a function's **kwargs, or none."""
    if not code.co_flags & _VARKEYWORDS:
        return ""
    positional = code.co_argcount + code.co_kwonlyargcount
    return code.co_varnames[positional + bool(code.co_flags & 0x04)]
