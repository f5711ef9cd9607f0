"""The forward of an attention layer under a mode that intercepts every torch function it calls."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sinkwise.interception.mha import unwrapped_mha
from sinkwise.mitigations.base import AddedHooks, Insertion, ReplacedForward


class LayerMode(TorchFunctionMode, ABC):
    """Active during one call of an attention layer; `intercept` gets every torch function in it.

    This includes the body of `F.multi_head_attention_forward`. Under a mode
    `nn.MultiheadAttention` takes no fast path, which would bypass it.
    """

    @abstractmethod
    def intercept(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call `func`, or something else in its place."""

    @abstractmethod
    def finish(self) -> None:
        """Check the finished call. Raises InputError if the mode could not act on it."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self:
                return unwrapped_mha()(*args, **kwargs)
        return self.intercept(func, args, kwargs)


class ForwardOverride(ABC):
    """The forward of one attention layer, each call under a `LayerMode` of its own."""

    def __init__(self, path: str, attention: nn.Module) -> None:
        self.path, self.attention = path, attention
        self._forward = self.__wrapped__ = attention.forward  # the latter for its signature
        # The compiler cannot trace into `unwrapped_mha`; anything else stays one graph.
        self._run = _uncompiled() if isinstance(attention, nn.MultiheadAttention) else _run

    @abstractmethod
    def mode(self, args: tuple, kwargs: dict[str, Any]) -> LayerMode:
        """The mode for a call with these arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.attention, nn.MultiheadAttention) and _is_nested(args, kwargs):
            return _call_padded(self, args, kwargs)
        mode = self.mode(args, kwargs)
        out = self._run(self._forward, mode, args, kwargs)
        mode.finish()
        return out


def override_forward(override: ForwardOverride, insertions: list[Insertion]) -> None:
    """Replace the forward of the override's layer."""
    attention = override.attention
    insertions.append(ReplacedForward(attention, override))
    if isinstance(attention, nn.MultiheadAttention):
        # The fused kernel of TransformerEncoderLayer calls no attention module, unless one of its
        # modules has a hook.
        insertions.append(AddedHooks([attention.register_forward_pre_hook(_no_fast_path)]))


def _no_fast_path(module: nn.Module, args: tuple) -> None:
    """Does nothing: its presence is enough."""


def _run(forward: Callable, mode: LayerMode, args: tuple, kwargs: dict[str, Any]) -> Any:
    with mode:
        return forward(*args, **kwargs)


@functools.cache
def _uncompiled() -> Callable:
    """`_run`, skipped by torch.compile. Not a decorator: that would import the compiler here."""
    return torch.compiler.disable(_run)


_MHA = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask")


def _is_nested(args: tuple, kwargs: dict[str, Any]) -> bool:
    query = args[0] if args else kwargs.get("query")
    return isinstance(query, Tensor) and query.is_nested


def _call_padded(override: ForwardOverride, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A nested tensor, which torch supports only on its fast path, padded during the call.

    `TransformerEncoder` makes nested tensors from a padding mask in inference.
    """
    given = dict(zip(_MHA, args, strict=False)) | kwargs
    query = given["query"]
    masked = any(given.get(name) is not None for name in ("key_padding_mask", "attn_mask"))
    if masked or given["key"] is not query or given["value"] is not query:
        return override._forward(*args, **kwargs)  # torch raises its own error
    lengths = [len(row) for row in query.unbind()]
    x = query.to_padded_tensor(0.0)
    ends = torch.tensor(lengths, device=x.device)[:, None]
    padding = torch.arange(x.shape[1], device=x.device) >= ends
    given.update(query=x, key=x, value=x, key_padding_mask=padding)
    out, weights = override(**given)
    rows = [row[:length] for row, length in zip(out, lengths, strict=True)]
    return torch.nested.as_nested_tensor(rows), weights
