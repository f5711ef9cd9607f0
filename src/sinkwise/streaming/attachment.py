"""What a sink cache hangs on a model: two hooks on its decoder, that act on calls that carry it.

Before such a call the hook takes the positions and the mask into the cache's own hands, splits a
chunk that is too long for one plan, and hangs on the attention modules what they must get instead
of the model's own mask; after the call all that is gone again.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sinkwise.errors import InputError
from sinkwise.streaming.positions.decoder import Decoder
from sinkwise.streaming.positions.exact import exact_rotary

if TYPE_CHECKING:
    from sinkwise.streaming.cache import SinkCache

_CACHE = ("past_key_values", "cache")
"""The cache's argument in transformers 4 and late 5."""
_TOKENS = ("input_ids", "inputs_embeds", "token_type_ids")
"""Arguments with a column a token."""


def attach(cache: "SinkCache") -> Callable[[], None]:
    """Hang the hooks on the cache's model; returns what takes them off.

    The hooks know the cache weakly, so that it can be collected.
    """
    known = weakref.ref(cache)
    base = cache.decoder.base
    handles = [
        base.register_forward_pre_hook(partial(_before, known), with_kwargs=True),
        base.register_forward_hook(partial(_after, known), with_kwargs=True, always_call=True),
    ]
    return partial(_remove, handles)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _carried(
    known: "weakref.ref[SinkCache]", args: tuple[Any, ...], kwargs: dict[str, Any]
) -> "SinkCache | None":
    """The cache, where this call carries it."""
    cache = known()
    if cache is None:
        return None
    if any(kwargs.get(name) is cache for name in _CACHE) or any(arg is cache for arg in args):
        return cache
    return None


@torch.compiler.disable
def _before(
    known: "weakref.ref[SinkCache]", module: nn.Module, args: tuple[Any, ...], kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    cache = _carried(known, args, kwargs)
    if cache is None:
        return None
    kwargs = {**dict(zip(cache.decoder.parameters, args, strict=False)), **kwargs}
    given = [kwargs[name] for name in _TOKENS if kwargs.get(name) is not None]
    if not given:
        raise InputError("this call has neither input_ids nor inputs_embeds")
    if cache.call is not None:  # interrupted from outside: torch runs no hook then
        _remove(cache.during)
        cache.end(failed=True)
    _check(cache, kwargs)
    length = given[0].shape[1]
    real = _real(cache, kwargs.pop("attention_mask", None), given[0])
    sizes = cache.split(len(given[0]), length, real)
    outputs, start = [], 0
    for size in sizes[:-1]:
        part = _part(kwargs, start, size, length)
        part["attention_mask"] = None if real is None else real[:, start : start + size]
        outputs.append(module(**part))
        start += size
    kwargs = _part(kwargs, start, sizes[-1], length)
    last = None if real is None else real[:, start:]
    call = cache.begin(len(given[0]), sizes[-1], last)
    cache.earlier = outputs
    device = given[0].device
    if "position_ids" in cache.decoder.parameters:
        kwargs["position_ids"] = cache.position_ids(call).to(device)
    if "cache_position" in cache.decoder.parameters:
        kwargs["cache_position"] = torch.arange(
            call.past, call.past + call.tokens.length, device=device
        )
    kwargs["use_cache"] = True
    try:
        cache.during = _hang(cache, cache.decoder)
    except InputError:
        cache.call = None  # nothing is stored yet
        raise
    return (), kwargs


def _check(cache: "SinkCache", kwargs: dict[str, Any]) -> None:
    """Refuse what cannot be right."""
    if kwargs.get("use_cache") is False:
        raise InputError(
            "use_cache=False in a call with a SinkCache (some configurations say so): give "
            "use_cache=True as well"
        )
    if cache.decoder.base.training and torch.is_grad_enabled():
        raise InputError(
            "a SinkCache holds no gradients: call model.eval() or use torch.no_grad(); for "
            "training there is sinkwise.nn.masks.sink_mask"
        )


def _real(cache: "SinkCache", mask: Any, tokens: Tensor) -> Tensor | None:
    """Which of the new tokens are real; None where all are."""
    if mask is None:
        return None
    batch, length = tokens.shape[:2]
    seen = cache.rows.columns
    if not isinstance(mask, Tensor) or mask.dim() != 2 or len(mask) != batch:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(
            f"attention_mask is {shape}: a sink cache makes its own masks and needs to know the "
            f"padding only; give a tensor of {batch} rows of 1 (real) and 0 (padding)"
        )
    if mask.shape[1] not in (length, seen + length):
        raise InputError(
            f"attention_mask has {mask.shape[1]} columns: {length} (the new tokens) or "
            f"{seen + length} (all that the cache has seen and the new ones) are right"
        )
    real = mask[:, -length:].to("cpu").bool()
    return None if bool(real.all()) else real


def _part(kwargs: dict[str, Any], start: int, size: int, length: int) -> dict[str, Any]:
    """The arguments of a call for some of its tokens."""
    if size == length:
        return dict(kwargs)
    if kwargs.get("output_attentions"):
        raise InputError(
            f"output_attentions with {length} tokens at once, which must be split into shorter "
            f"calls; give at most {size} at a time"
        )
    out = dict(kwargs)
    for name in _TOKENS:
        if isinstance(out.get(name), Tensor):
            out[name] = out[name][:, start : start + size]
    return out


def _hang(cache: "SinkCache", decoder: Decoder) -> list[Any]:
    """Hooks for the time of the call."""
    handles: list[Any] = []
    if cache.needs_mask:
        name = decoder.config._attn_implementation or ""
        if "flash" in name or "flex" in name:
            raise InputError(
                f"attn_implementation={name!r} takes no mask of queries by keys, which padding, "
                "position biases and chunks after the first eviction need; load the model with "
                "attn_implementation='sdpa', or give single tokens without padding"
            )
        for module, layer in zip(decoder.attention, cache.layers, strict=True):
            hook = partial(_instead, weakref.ref(cache), layer.retention)
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    embedding: Any = decoder.base.get_input_embeddings()
    if embedding.weight.dtype == torch.float64:
        handles += exact_rotary(decoder.base)
    return handles


@torch.compiler.disable
def _instead(
    known: "weakref.ref[SinkCache]", retention: Any, module: nn.Module, args: Any, kwargs: Any
) -> tuple[Any, dict[str, Any]]:
    """Give an attention module the cache's mask and bias."""
    cache = known()
    assert cache is not None and cache.call is not None
    states = kwargs.get("hidden_states", args[0] if args else None)
    given = cache.call.arguments(retention, cache.positions.bias, states)
    for name in given:
        if name not in kwargs:
            raise InputError(
                f"{type(module).__name__} does not get {name!r} by its name: a sink cache cannot "
                "give it its own"
            )
    return args, {**kwargs, **given}


@torch.compiler.disable
def _after(
    known: "weakref.ref[SinkCache]",
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> Any:
    """Count the tokens, take the hooks of the call off, join the parts of a split call."""
    cache = _carried(known, args, kwargs)
    if cache is None or cache.call is None:
        return None
    _remove(cache.during)
    earlier, cache.during, cache.earlier = cache.earlier, [], []
    cache.end(failed=output is None)
    return _joined([*earlier, output]) if earlier and output is not None else None


def _joined(outputs: list[Any]) -> Any:
    """One output of several consecutive ones."""
    last = outputs[-1]
    if isinstance(last, tuple):
        return (torch.cat([output[0] for output in outputs], dim=1), *last[1:])
    last["last_hidden_state"] = torch.cat(
        [output["last_hidden_state"] for output in outputs], dim=1
    )
    if last.get("hidden_states") is not None:
        layers = zip(*(output["hidden_states"] for output in outputs), strict=True)
        last["hidden_states"] = tuple(torch.cat(parts, dim=1) for parts in layers)
    return last
