"""What attaches a sink cache to a model: two hooks on its decoder and the state of a call.

The hooks act on calls that carry the cache. Before such a call they replace the model's positions
and mask by the cache's, and split a chunk that is too long for one plan. Attention modules that
need the cache's mask get hooks for the time of the call.
"""

import weakref
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from sinkwise.core.retention import Retention
from sinkwise.errors import InputError
from sinkwise.streaming import arguments
from sinkwise.streaming.call import CacheCall
from sinkwise.streaming.positions.decoder import Decoder
from sinkwise.streaming.positions.exact import exact_rotary
from sinkwise.streaming.positions.scheme import Positions


@runtime_checkable
class Session(Protocol):
    """What the hooks need of the cache that they serve."""

    @property
    def columns(self) -> int:
        """Columns of all calls so far, padding included."""

    def split(self, batch: int, length: int) -> list[int]:
        """Lengths of the calls that a call is split into."""

    def begin(self, batch: int, length: int, real: Bool[Tensor, "batch query"] | None) -> CacheCall:
        """Plan a call."""

    def end(self, call: CacheCall, failed: bool) -> None:
        """Count the tokens of a call that is over."""


class Attachment:
    """The hooks of one cache on one model, and the call in progress.

    It refers to the cache weakly, so that a cache that nobody uses is collected.
    """

    def __init__(
        self,
        session: Session,
        decoder: Decoder,
        positions: Positions,
        retentions: tuple[Retention, ...],
    ) -> None:
        """`retentions`: what each layer keeps."""
        self._session = weakref.ref(session)
        self._decoder, self._positions, self._retentions = decoder, positions, retentions
        self.call: CacheCall | None = None
        """The call in progress."""
        self._call_hooks: list[Any] = []
        """Hooks that stay for the time of the call."""
        self._earlier: list[Any] = []
        """Outputs of the earlier parts of a split call."""
        self._hooks = [
            decoder.base.register_forward_pre_hook(self._before, with_kwargs=True),
            decoder.base.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    def abandon(self) -> CacheCall | None:
        """Forget the call in progress, remove its hooks, and return it, if there is one."""
        call, self.call, self._earlier = self.call, None, []
        _remove(self._call_hooks)
        return call

    def close(self) -> None:
        """Remove every hook from the model."""
        self.abandon()
        _remove(self._hooks)

    def _carried(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Session | None:
        """The cache, if this call carries it."""
        session = self._session()
        carried = (*args, *(kwargs.get(name) for name in arguments.CACHES))
        return session if session is not None and any(a is session for a in carried) else None

    @torch.compiler.disable
    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Take over the positions and the mask; make all calls of a split call but the last."""
        session = self._carried(args, kwargs)
        if session is None:
            return None
        kwargs = {**dict(zip(self._decoder.parameters, args, strict=False)), **kwargs}
        given = arguments.tokens_of(kwargs)
        interrupted = self.abandon()  # torch runs no hook after a KeyboardInterrupt
        if interrupted is not None:
            session.end(interrupted, failed=True)
        arguments.check(kwargs, self._decoder.base)
        batch, length = given.shape[:2]
        real = arguments.real(kwargs.pop("attention_mask", None), batch, length, session.columns)
        sizes = session.split(batch, length)
        outputs, start = [], 0
        for size in sizes[:-1]:
            part = arguments.part(kwargs, start, size, length)
            part["attention_mask"] = None if real is None else real[:, start : start + size]
            outputs.append(module(**part))
            start += size
        kwargs = arguments.part(kwargs, start, sizes[-1], length)
        call = session.begin(batch, sizes[-1], None if real is None else real[:, start:])
        self._call_hooks = self._call_hooks_of(call)
        self.call, self._earlier = call, outputs
        if "position_ids" in self._decoder.parameters:
            kwargs["position_ids"] = self._position_ids(call).to(given.device)
        if "cache_position" in self._decoder.parameters:
            last = call.past + call.tokens.length
            kwargs["cache_position"] = torch.arange(call.past, last, device=given.device)
        kwargs["use_cache"] = True
        return (), kwargs

    @torch.compiler.disable
    def _after(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Count the tokens, remove the hooks of the call, join the parts of a split call."""
        session = self._carried(args, kwargs)
        if session is None or self.call is None:
            return None
        earlier, call = self._earlier, self.abandon()
        assert call is not None
        session.end(call, failed=output is None)
        return arguments.joined([*earlier, output]) if earlier and output is not None else None

    def _position_ids(self, call: CacheCall) -> Int[Tensor, "batch query"]:
        """The positions that the model gets."""
        if self._positions.learned is None:
            return call.positions()
        return call.tokens.index.clamp(max=call.retention.capacity - 1)

    def _call_hooks_of(self, call: CacheCall) -> list[Any]:
        """Register the hooks for the time of a call."""
        handles: list[Any] = []
        if self._positions.bias is not None or call.needs_mask:
            name = self._decoder.config._attn_implementation or ""
            if "flash" in name or "flex" in name:
                raise InputError(
                    f"attn_implementation={name!r} takes no mask of queries by keys, which "
                    "padding, position biases and chunks after the first eviction need; load the "
                    "model with attn_implementation='sdpa', or give single tokens without padding"
                )
            for module, retention in zip(self._decoder.attention, self._retentions, strict=True):
                hook = partial(_replace_mask, call, retention, self._positions)
                handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        embedding: Any = self._decoder.base.get_input_embeddings()
        if embedding.weight.dtype == torch.float64:
            handles += exact_rotary(self._decoder.base)
        return handles


def _remove(handles: list[Any]) -> None:
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
