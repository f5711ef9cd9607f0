"""Milliseconds per step of every method of a comparison, interleaved."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from sinkwise.streaming.cache import SinkCache
from sinkwise.streaming.comparison.caches import dense_length, empty_cache
from sinkwise.streaming.comparison.methods import TIMED_STEPS, Method
from sinkwise.streaming.positions.decoder import decoder_of


@torch.no_grad()
def step_times(model: nn.Module, tokens: list[int], methods: Sequence[Method]) -> dict[str, float]:
    """Median milliseconds per token at the end of the text, batch 1, by the methods' names.

    In each of `TIMED_STEPS` rounds every method takes the same token in turn, so that all see the
    same machine. The dense cache holds as many keys as the text has tokens, made by repeating the
    first ones: the content of keys does not change their cost.
    """
    ids = torch.tensor([tokens], device=_embedding(model).device)
    steps: dict[str, Callable[[int], Any]] = {}
    caches = []
    for method in methods:
        if method.restart_every:
            continue
        if method.kind == "recompute":
            steps[method.name] = _recomputing(model, ids, method)
            continue
        cache = _filled(model, ids, method)
        caches.append(cache)
        steps[method.name] = _stepping(model, ids, cache)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for at in range(len(tokens) - TIMED_STEPS, len(tokens)):
        for name, step in steps.items():
            started = time.perf_counter()
            float(step(at).logits[0, -1, 0])  # waits for a GPU
            times[name].append(1000 * (time.perf_counter() - started))
    for cache in caches:
        if isinstance(cache, SinkCache):
            cache.close()
    return {name: median(measured) for name, measured in times.items()}


def _embedding(model: Any) -> Tensor:
    return model.get_input_embeddings().weight


def _stepping(model: nn.Module, ids: Tensor, cache: Any) -> Callable[[int], Any]:
    name = decoder_of(model).cache_argument
    return lambda at: model(ids[:, at : at + 1], use_cache=True, **{name: cache})


def _recomputing(model: nn.Module, ids: Tensor, method: Method) -> Callable[[int], Any]:
    return lambda at: model(ids[:, at + 1 - method.cache_length : at + 1], use_cache=False)


def _filled(model: Any, ids: Tensor, method: Method) -> Any:
    """A cache of the method as full as before the timed steps."""
    cache = empty_cache(model, method)
    name = decoder_of(model).cache_argument
    model(ids[:, : method.cache_length], use_cache=True, **{name: cache})
    if method.kind == "dense":
        wanted = dense_length(model, ids.shape[1]) - TIMED_STEPS
        for layer in cache.layers:
            if not getattr(layer, "is_sliding", False):
                times = -(-wanted // layer.keys.shape[2])
                layer.keys, layer.values = (
                    part.repeat(1, 1, times, 1)[:, :, :wanted]
                    for part in (layer.keys, layer.values)
                )
    return cache
