"""The forward of an attention layer, run under a mode that sees every torch function in it."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sinkwise.interception.mha import unwrapped_mha
from sinkwise.mitigations.base import Forward, Hooks, Part


class Inside(TorchFunctionMode, ABC):
    """One run of an attention layer: `see` gets each torch function that is called in it.

    The body of `F.multi_head_attention_forward` is seen too, and `nn.MultiheadAttention` takes no
    fast path under a mode, which would go past it.
    """

    @abstractmethod
    def see(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call `func`, or something in its place."""

    @abstractmethod
    def done(self) -> None:
        """The run is over. Raises InputError where it was not one that could be seen."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self:
                return unwrapped_mha()(*args, **kwargs)
        return self.see(func, args, kwargs)


class Watched(ABC):
    """Stands in for the forward of one attention layer, each run under an `Inside` of its own."""

    def __init__(self, path: str, attention: nn.Module) -> None:
        self.path, self.attention = path, attention
        self._forward = self.__wrapped__ = attention.forward  # the latter for its signature
        # The compiler cannot follow into `unwrapped_mha`; anything else stays one graph.
        self._run = _uncompiled() if isinstance(attention, nn.MultiheadAttention) else _run

    @abstractmethod
    def mode(self, args: tuple, kwargs: dict[str, Any]) -> Inside:
        """What a run with these arguments is under."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.attention, nn.MultiheadAttention) and _is_nested(args, kwargs):
            return _nested(self, args, kwargs)
        mode = self.mode(args, kwargs)
        out = self._run(self._forward, mode, args, kwargs)
        mode.done()
        return out


def watch(watched: Watched, parts: list[Part]) -> None:
    """Put it in the place of its layer's forward."""
    attention = watched.attention
    parts.append(Forward(attention, watched))
    if isinstance(attention, nn.MultiheadAttention):
        # The fused kernel of TransformerEncoderLayer calls no attention module, unless one of its
        # modules has a hook.
        parts.append(Hooks([attention.register_forward_pre_hook(_no_fast_path)]))


def _no_fast_path(module: nn.Module, args: tuple) -> None:
    """Does nothing: that it is there is enough."""


def _run(forward: Callable, mode: Inside, args: tuple, kwargs: dict[str, Any]) -> Any:
    with mode:
        return forward(*args, **kwargs)


@functools.cache
def _uncompiled() -> Callable:
    """`_run`, left alone by torch.compile. Not decorated: that would import the compiler here."""
    return torch.compiler.disable(_run)


_MHA = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")


def _is_nested(args: tuple, kwargs: dict[str, Any]) -> bool:
    query = args[0] if args else kwargs.get("query")
    return isinstance(query, Tensor) and query.is_nested


def _nested(watched: Watched, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Rows of unlike lengths, which torch attends to on its fast path alone: padded for the time of
    the call. `TransformerEncoder` makes them of a padding mask, in inference.
    """
    given = dict(zip(_MHA, args, strict=False)) | kwargs
    query = given["query"]
    masked = any(given.get(name) is not None for name in ("key_padding_mask", "attn_mask"))
    if masked or given["key"] is not query or given["value"] is not query:
        return watched._forward(*args, **kwargs)  # torch's own refusal
    lengths = [len(row) for row in query.unbind()]
    x = query.to_padded_tensor(0.0)
    ends = torch.tensor(lengths, device=x.device)[:, None]
    hidden = torch.arange(x.shape[1], device=x.device) >= ends
    given.update(query=x, key=x, value=x, key_padding_mask=hidden)
    out, weights = watched(**given)
    rows = [row[:length] for row, length in zip(out, lengths, strict=True)]
    return torch.nested.as_nested_tensor(rows), weights
