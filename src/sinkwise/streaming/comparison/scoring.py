"""One text scored with one method: dense, a plain window, recomputation, or sinks + window."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sinkwise.streaming.cache import SinkCache
from sinkwise.streaming.comparison.caches import dense_length, empty_cache
from sinkwise.streaming.comparison.methods import TIMED_STEPS, Method, check_length
from sinkwise.streaming.positions.decoder import decoder_of

CHUNK = 256
"""Tokens scored at once; a chunk gives what its tokens give one by one."""


@dataclass(frozen=True)
class MethodRun:
    """The losses of one method on a text."""

    method: Method
    positions: list[int]
    """The tokens that were scored."""
    losses: list[float]
    """−ln p of each."""
    bytes: int
    """Size of the keys and values kept at the end."""


@torch.no_grad()
def run_method(
    model: nn.Module,
    tokens: list[int],
    method: Method,
    recompute_every: int = 1,
    progress: Callable[[int], Any] | None = None,
) -> MethodRun:
    """Score a text with one method.

    All tokens except the first and the last `TIMED_STEPS` are scored. Recomputation scores every
    `recompute_every`-th, from the `cache_length` tokens before it; dense attention scores those
    for which the model has learned positions, if it has any.

    Raises InputError for a text that is not longer than the cache, or too short for a restart.

    Reference: Xiao et al., 2023, arXiv 2309.17453.
    """
    check_length(len(tokens), method)
    score = _recomputed if method.kind == "recompute" else _cached
    return score(
        model, torch.tensor([tokens]), method, recompute_every, progress or (lambda _: None)
    )


def _cached(
    model: Any, ids: Tensor, method: Method, _every: int, progress: Callable[[int], Any]
) -> MethodRun:
    name = decoder_of(model).cache_argument
    cache = empty_cache(model, method)
    ids = ids.to(model.get_input_embeddings().weight.device)
    scored = ids.shape[1] - TIMED_STEPS
    if method.kind == "dense":
        scored = dense_length(model, scored)
    settled = 2 * method.cache_length if method.restart_every else 1
    positions: list[int] = []
    losses: list[float] = []
    for begin in range(0, scored, method.restart_every or scored):
        if begin:
            cache.reset()
        end = min(begin + (method.restart_every or scored), scored)
        forward = partial(model, use_cache=True, **{name: cache})
        part = _losses(forward, ids[:, begin:end], partial(_from, progress, begin))
        positions += range(begin + settled, end)
        losses += part[settled - 1 :]
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    if isinstance(cache, SinkCache):
        cache.close()
    return MethodRun(method, positions, losses, kept)


def _from(progress: Callable[[int], Any], begin: int, done: int) -> None:
    progress(begin + done)


def _losses(
    forward: Callable[..., Any], ids: Tensor, progress: Callable[[int], Any]
) -> list[float]:
    """−ln p of every token except the first, chunk by chunk."""
    out: list[float] = []
    before: Tensor | None = None
    for start in range(0, ids.shape[1], CHUNK):
        part = ids[:, start : start + CHUNK]
        logits = forward(part).logits[0].float()
        known = logits[:-1] if before is None else torch.cat([before, logits[:-1]])
        target = part[0, 1:] if before is None else part[0]
        out += torch.nn.functional.cross_entropy(known, target, reduction="none").tolist()
        before = logits[-1:]
        progress(start + part.shape[1])
    return out


def _recomputed(
    model: Any, ids: Tensor, method: Method, every: int, progress: Callable[[int], Any]
) -> MethodRun:
    length = method.cache_length
    ids = ids.to(model.get_input_embeddings().weight.device)
    positions = list(range(length, ids.shape[1] - TIMED_STEPS, every))
    losses: list[float] = []
    for target in positions:
        window = ids[:, target - length : target]
        logits = model(window, use_cache=False).logits[0, -1:].float()
        losses.append(float(torch.nn.functional.cross_entropy(logits, ids[0, target : target + 1])))
        progress(target)
    return MethodRun(method, positions, losses, 0)
