"""Adapter for `sinkwise.sink_attention`: one call with its sink logit, whatever runs inside."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from sinkwise.interception import sdpa
from sinkwise.interception.intercepted import Description, Intercepted


def intercept(func: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor, Description]:
    """Run the call and describe it; `func(q, k, v, sink, ...)` hands its tensors on by position."""
    out = func(*args, **kwargs)
    q, k, v, sink = args
    call = sdpa.bind(q, k, v, **{name: kwargs[name] for name in kwargs if name != "form"})

    def describe(owner: nn.Module | None) -> Intercepted:
        plain = sdpa.describe(call, out, None, owner)
        return replace(plain, fields={**plain.fields, "sink_logit": sink[None, :, None]})

    return out, describe
