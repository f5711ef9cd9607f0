"""The same text by dense attention, a plain window, recomputation, and sinks + window."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import exp, sqrt
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from sinkwise.errors import InputError
from sinkwise.hosts.inputs import position_limit
from sinkwise.streaming.cache import SinkCache
from sinkwise.streaming.positions.decoder import decoder_of

CHUNK = 256
"""Tokens that are scored at once; a chunk gives what its tokens give one by one."""
TIMED_STEPS = 16
"""Tokens at the end of a text that are not scored: they time single steps."""


@dataclass(frozen=True)
class Method:
    """A way to keep memory of an endless text."""

    kind: str
    """`dense`, `window`, `recompute` or `sinks`."""
    cache_length: int
    """Keys that a token may see, itself included; `dense` has no end."""
    num_sink_tokens: int = 0
    """Of them, first tokens of the text."""
    restart_every: int = 0
    """Tokens after which it begins anew with an empty cache; 0: never. What it scores then are
    the tokens 2 · `cache_length` and more behind a restart."""

    @property
    def name(self) -> str:
        """What tables call it."""
        if self.kind == "sinks":
            window = self.cache_length - self.num_sink_tokens
            anew = ", restarted" if self.restart_every else ""
            return f"{self.num_sink_tokens} + {window}{anew}"
        return {"window": f"0 + {self.cache_length}"}.get(self.kind, self.kind)


@dataclass(frozen=True)
class Course:
    """How a method went over a text."""

    method: Method
    positions: list[int]
    """Tokens that were scored."""
    losses: list[float]
    """−ln p of each."""
    bytes: int
    """Of the keys and values kept at the end."""


def methods(cache_length: int, sinks: list[int], restart_every: int = 0) -> list[Method]:
    """Dense, window, recomputation, and a sink cache for each number of sinks, all with the same
    number of keys. With `restart_every` the one with the most sinks comes once more, restarted: a
    cache that stays as good as a new one is as good as that.

    Raises InputError for a number of sinks that leaves no window, and for restarts so dense that
    they leave nothing to score.
    """
    for count in sinks:
        if not 0 <= count < cache_length:
            raise InputError(
                f"num_sink_tokens={count} with cache_length={cache_length}: from 0 to "
                f"{cache_length - 1} is right"
            )
    if restart_every and (restart_every <= 2 * cache_length or not any(sinks)):
        raise InputError(
            f"restart_every={restart_every} with cache_length={cache_length}: 0 or more than "
            f"{2 * cache_length} is right, and a number of sinks above 0"
        )
    out = [Method(kind, cache_length) for kind in ("dense", "window", "recompute")]
    out += [Method("sinks", cache_length, count) for count in sinks if count]
    if restart_every:
        out.append(Method("sinks", cache_length, max(sinks), restart_every))
    return out


def check_length(count: int, method: Method) -> None:
    """Raise InputError where a text of so many tokens is too short for the method."""
    if count <= method.cache_length + TIMED_STEPS:
        raise InputError(
            f"the text has {count} tokens; more than cache_length={method.cache_length} and "
            f"{TIMED_STEPS} timed ones are needed"
        )
    if method.restart_every and count <= method.restart_every + TIMED_STEPS:
        raise InputError(
            f"restart_every={method.restart_every} in a text of {count} tokens: there is no "
            "restart; fewer is right"
        )


@torch.no_grad()
def course(
    model: nn.Module,
    tokens: list[int],
    method: Method,
    recompute_every: int = 1,
    progress: Callable[[int], Any] | None = None,
) -> Course:
    """Score the text by one method.

    Every token but the first and the last `TIMED_STEPS` is scored; by recomputation every
    `recompute_every`-th only, from the `cache_length` tokens before it; by dense attention those
    for which the model has learned a position, where it has such.

    Raises InputError for a text not longer than the cache, or too short for a restart.

    Reference: Xiao et al., 2023, arXiv 2309.17453.
    """
    check_length(len(tokens), method)
    run = _recomputed if method.kind == "recompute" else _cached
    return run(model, torch.tensor([tokens]), method, recompute_every, progress or (lambda _: None))


def _cached(
    model: Any, ids: Tensor, method: Method, _every: int, progress: Callable[[int], Any]
) -> Course:
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
        read = partial(model, use_cache=True, **{name: cache})
        part = _losses(read, ids[:, begin:end], partial(_from, progress, begin))
        positions += range(begin + settled, end)
        losses += part[settled - 1 :]
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    if isinstance(cache, SinkCache):
        cache.close()
    return Course(method, positions, losses, kept)


def empty_cache(model: Any, method: Method) -> Any:
    """A cache of the method's kind, attached to the model where it is a sink cache."""
    from transformers import DynamicCache

    if method.kind == "dense":
        return DynamicCache(config=model.config)
    window = method.cache_length - method.num_sink_tokens
    return SinkCache(model, window, method.num_sink_tokens)


def dense_length(model: nn.Module, length: int) -> int:
    """Tokens that dense attention can take of so many."""
    learned = position_limit(decoder_of(model).base)
    return length if learned is None else min(length, learned)


def _from(progress: Callable[[int], Any], begin: int, done: int) -> None:
    progress(begin + done)


def _losses(read: Callable[..., Any], ids: Tensor, progress: Callable[[int], Any]) -> list[float]:
    """−ln p of every token but the first, read chunk by chunk."""
    out: list[float] = []
    before: Tensor | None = None
    for start in range(0, ids.shape[1], CHUNK):
        part = ids[:, start : start + CHUNK]
        logits = read(part).logits[0].float()
        known = logits[:-1] if before is None else torch.cat([before, logits[:-1]])
        target = part[0, 1:] if before is None else part[0]
        out += torch.nn.functional.cross_entropy(known, target, reduction="none").tolist()
        before = logits[-1:]
        progress(start + part.shape[1])
    return out


def _recomputed(
    model: Any, ids: Tensor, method: Method, every: int, progress: Callable[[int], Any]
) -> Course:
    length = method.cache_length
    ids = ids.to(model.get_input_embeddings().weight.device)
    positions = list(range(length, ids.shape[1] - TIMED_STEPS, every))
    losses: list[float] = []
    for target in positions:
        window = ids[:, target - length : target]
        logits = model(window, use_cache=False).logits[0, -1:].float()
        losses.append(float(torch.nn.functional.cross_entropy(logits, ids[0, target : target + 1])))
        progress(target)
    return Course(method, positions, losses, 0)


def perplexity(one: Course, start: int, stop: int) -> float:
    """exp of the mean loss of the scored tokens start ≤ t < stop; NaN where there are none.

    1 is certainty; a vocabulary's size is knowing nothing.
    """
    pairs = zip(one.positions, one.losses, strict=True)
    chosen = [loss for position, loss in pairs if start <= position < stop]
    if not chosen:
        return float("nan")
    return float(torch.tensor(chosen, dtype=torch.float64).mean().exp())


@dataclass(frozen=True)
class Gap:
    """By how much one course is worse than another on the tokens that both have scored."""

    ratio: float
    """Of the perplexities: exp of the mean difference of the losses."""
    standard_error: float
    """Of the ratio, as if tokens were independent of each other."""
    tokens: int
    """That both have scored, the cache full."""


def gap(one: Course, other: Course) -> Gap:
    """The first over the second; NaN where they share fewer than two tokens."""
    theirs = dict(zip(other.positions, other.losses, strict=True))
    start = max(one.method.cache_length, other.method.cache_length)
    pairs = zip(one.positions, one.losses, strict=True)
    both = [loss - theirs[at] for at, loss in pairs if at >= start and at in theirs]
    if len(both) < 2:
        return Gap(float("nan"), float("nan"), len(both))
    ratio = exp(fmean(both))
    return Gap(ratio, ratio * stdev(both) / sqrt(len(both)), len(both))


def curve(one: Course, width: int) -> Iterator[tuple[int, float]]:
    """(middle, perplexity) of consecutive stretches of the text of `width` tokens."""
    for start in range(0, one.positions[-1] + 1, width):
        value = perplexity(one, start, start + width)
        if value == value:
            yield start + width // 2, value
