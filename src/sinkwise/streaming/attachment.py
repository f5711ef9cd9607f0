"""What attaches a sink cache to a model: two hooks on its decoder and the state of a call.

The hooks act on calls that carry the cache. Before such a call they replace the model's positions
and mask by the cache's, and split a chunk that is too long for one plan. Attention modules that
need the cache's mask get hooks for the time of the call.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from sinkwise.core.retention import Retention
from sinkwise.errors import InputError
from sinkwise.streaming import arguments
from sinkwise.streaming.call import CacheCall
from sinkwise.streaming.positions.decoder import Decoder
from sinkwise.streaming.positions.exact import exact_rotary
from sinkwise.streaming.positions.scheme import Positions
from sinkwise.streaming.state import CacheState


class Attachment:
    """The hooks of one cache on one model, and the call in progress.

    The cache owns it; the hooks refer to it weakly, and it to the cache. When the cache is
    collected, all hooks are removed.
    """

    def __init__(self, cache: object, decoder: Decoder, state: CacheState) -> None:
        self._cache = weakref.ref(cache)
        self._decoder, self._state = decoder, state
        self.call: CacheCall | None = None
        """The call in progress."""
        self.failed = False
        """Whether a call ended early, so that only some layers have its keys."""
        self._call_hooks: list[Any] = []
        """Hooks that stay for the time of the call."""
        self._earlier: list[Any] = []
        """Outputs of the earlier parts of a split call."""
        self._hooks = [
            decoder.base.register_forward_pre_hook(_weakly(self._before), with_kwargs=True),
            decoder.base.register_forward_hook(
                _weakly(self._after), with_kwargs=True, always_call=True
            ),
        ]
        self._detach = weakref.finalize(self, _remove, self._hooks, self._call_hooks)
        self._detach.atexit = False

    def reset(self) -> None:
        """Forget the call in progress and that a call has failed."""
        self._forget_call()
        self.failed = False

    def close(self) -> None:
        """Remove every hook from the model, for good."""
        self._detach()
        self._forget_call()

    def _forget_call(self) -> None:
        _remove(self._call_hooks)
        self.call, self._earlier = None, []

    def _carried(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this call carries the cache."""
        cache = self._cache()
        carried = (*args, *(kwargs.get(name) for name in arguments.CACHES))
        return cache is not None and any(given is cache for given in carried)

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Take over the positions and the mask; make all calls of a split call but the last."""
        if not self._carried(args, kwargs):
            return None
        kwargs = {**dict(zip(self._decoder.parameters, args, strict=False)), **kwargs}
        given = arguments.tokens_of(kwargs)
        if self.call is not None:  # torch runs no hook after a KeyboardInterrupt
            self._forget_call()
            self.failed = True
        arguments.check(kwargs, self._decoder.base)
        batch, length = given.shape[:2]
        seen = self._state.rows.columns
        real = arguments.real(kwargs.pop("attention_mask", None), batch, length, seen)
        self._check_usable(batch)
        sizes = self._state.split(length)
        outputs, start = [], 0
        for size in sizes[:-1]:
            part = arguments.part(kwargs, start, size, length)
            part["attention_mask"] = None if real is None else real[:, start : start + size]
            outputs.append(module(**part))
            start += size
        kwargs = arguments.part(kwargs, start, sizes[-1], length)
        call = self._state.begin(batch, sizes[-1], None if real is None else real[:, start:])
        self._call_hooks += self._call_hooks_of(call)
        self.call, self._earlier = call, outputs
        if "position_ids" in self._decoder.parameters:
            kwargs["position_ids"] = self._position_ids(call).to(given.device)
        if "cache_position" in self._decoder.parameters:
            last = call.past + call.tokens.length
            kwargs["cache_position"] = torch.arange(call.past, last, device=given.device)
        kwargs["use_cache"] = True
        return (), kwargs

    def _after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Count the tokens, remove the hooks of the call, join the parts of a split call."""
        if self.call is None or not self._carried(args, kwargs):
            return None
        earlier, call = self._earlier, self.call
        self._forget_call()
        self.failed = output is None
        if self.failed:
            return None
        self._state.end(call)
        return arguments.joined([*earlier, output]) if earlier else None

    def _check_usable(self, batch: int) -> None:
        if not self._detach.alive:
            raise InputError("this SinkCache is closed; make a new one")
        if self.failed:
            raise InputError(
                "a call with this SinkCache failed before its end, and only some layers have its "
                "keys; reset() the cache and feed its text again"
            )
        self._state.rows.check(batch)

    def _position_ids(self, call: CacheCall) -> Int[Tensor, "batch query"]:
        """The positions that the model gets."""
        if self._state.positions.learned is None:
            return call.positions()
        return call.tokens.index.clamp(max=call.retention.capacity - 1)

    def _call_hooks_of(self, call: CacheCall) -> list[Any]:
        """Register the hooks for the time of a call."""
        handles: list[Any] = []
        positions = self._state.positions
        if positions.bias is not None or call.needs_mask:
            name = self._decoder.config._attn_implementation or ""
            if "flash" in name or "flex" in name:
                raise InputError(
                    f"attn_implementation={name!r} takes no mask of queries by keys, which "
                    "padding, position biases and chunks after the first eviction need; load the "
                    "model with attn_implementation='sdpa', or give single tokens without padding"
                )
            for module, layer in zip(self._decoder.attention, self._state.layers, strict=True):
                hook = partial(_replace_mask, call, layer.retention, positions)
                handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        embedding: Any = self._decoder.base.get_input_embeddings()
        if embedding.weight.dtype == torch.float64:
            handles += exact_rotary(self._decoder.base)
        return handles


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method as a hook that does not keep its object alive, and is not compiled."""
    known = weakref.WeakMethod(method)

    @torch.compiler.disable
    def hook(*args: Any) -> Any:
        found = known()
        return None if found is None else found(*args)

    return hook


def _remove(*lists: list[Any]) -> None:
    for handles in lists:
        while handles:
            handles.pop().remove()


@torch.compiler.disable
def _replace_mask(
    call: CacheCall,
    retention: Retention,
    positions: Positions,
    module: nn.Module,
    args: Any,
    kwargs: Any,
) -> tuple[Any, dict[str, Any]]:
    """Give an attention module the cache's mask and bias."""
    states = kwargs.get("hidden_states", args[0] if args else None)
    given = call.arguments(retention, positions.bias, states)
    for name in given:
        if name not in kwargs:
            raise InputError(
                f"{type(module).__name__} gets no argument named {name!r}: a sink cache cannot "
                "replace it"
            )
    return args, {**kwargs, **given}
