"""One text scored with dense attention, a plain window, recomputation, and sinks + window."""

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
"""Tokens scored at once; a chunk gives what its tokens give one by one."""
TIMED_STEPS = 16
"""Tokens at the end of a text that are not scored but used to time single steps."""


@dataclass(frozen=True)
class Method:
    """A way to keep the past of an endless text."""

    kind: str
    """`dense`, `window`, `recompute` or `sinks`."""
    cache_length: int
    """Number of keys that a token sees, itself included; no limit for `dense`."""
    num_sink_tokens: int = 0
    """How many of them are the first tokens of the text."""
    restart_every: int = 0
    """Number of tokens after which it restarts with an empty cache; 0: never. Only tokens at least
    2 · `cache_length` after a restart are scored then."""

    @property
    def name(self) -> str:
        """Its name in tables."""
        if self.kind == "sinks":
            window = self.cache_length - self.num_sink_tokens
            anew = ", restarted" if self.restart_every else ""
            return f"{self.num_sink_tokens} + {window}{anew}"
        return {"window": f"0 + {self.cache_length}"}.get(self.kind, self.kind)


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


def methods(cache_length: int, sinks: list[int], restart_every: int = 0) -> list[Method]:
    """Dense, window, recomputation, and a sink cache per number of sinks, with the same number of
    keys. With `restart_every`, the one with the most sinks is added once more, restarted: a cache
    that does not get worse over time is as good as that.

    Raises InputError for a number of sinks that leaves no window, and for restarts so frequent
    that they leave nothing to score.
    """
    for count in sinks:
        if not 0 <= count < cache_length:
            raise InputError(
                f"num_sink_tokens={count} must be at least 0 and below cache_length={cache_length}"
            )
    if restart_every and (restart_every <= 2 * cache_length or not any(sinks)):
        raise InputError(
            f"restart_every={restart_every} must be 0, or more than twice cache_length="
            f"{cache_length} with at least one number of sinks above 0"
        )
    out = [Method(kind, cache_length) for kind in ("dense", "window", "recompute")]
    out += [Method("sinks", cache_length, count) for count in sinks if count]
    if restart_every:
        out.append(Method("sinks", cache_length, max(sinks), restart_every))
    return out


def check_length(count: int, method: Method) -> None:
    """Raise InputError if a text of `count` tokens is too short for the method."""
    if count <= method.cache_length + TIMED_STEPS:
        raise InputError(
            f"the text has {count} tokens; it must have more than "
            f"{method.cache_length + TIMED_STEPS}: the cache's {method.cache_length} and "
            f"{TIMED_STEPS} that are timed"
        )
    if method.restart_every and count <= method.restart_every + TIMED_STEPS:
        raise InputError(
            f"restart_every={method.restart_every} must be less than "
            f"{count - TIMED_STEPS}, or a text of {count} tokens has no restart"
        )


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


def empty_cache(model: Any, method: Method) -> Any:
    """A cache of the method's kind; a sink cache is attached to the model."""
    from transformers import DynamicCache

    if method.kind == "dense":
        return DynamicCache(config=model.config)
    window = method.cache_length - method.num_sink_tokens
    return SinkCache(model, window, method.num_sink_tokens)


def dense_length(model: nn.Module, length: int) -> int:
    """How many of `length` tokens dense attention can take."""
    learned = position_limit(decoder_of(model).base)
    return length if learned is None else min(length, learned)


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


def perplexity(one: MethodRun, start: int, stop: int) -> float:
    """exp of the mean loss of the scored tokens start ≤ t < stop; NaN if there are none.

    From 1 (certain) to about the vocabulary's size (a uniform guess).
    """
    pairs = zip(one.positions, one.losses, strict=True)
    chosen = [loss for position, loss in pairs if start <= position < stop]
    if not chosen:
        return float("nan")
    return float(torch.tensor(chosen, dtype=torch.float64).mean().exp())


@dataclass(frozen=True)
class Gap:
    """How much worse one method is than another, on the tokens that both have scored."""

    ratio: float
    """Ratio of the perplexities: exp of the mean difference of the losses."""
    standard_error: float
    """Standard error of the ratio, assuming independent tokens."""
    tokens: int
    """Number of tokens that both have scored with a full cache."""


def gap(one: MethodRun, other: MethodRun) -> Gap:
    """The first over the second; NaN if they share fewer than two tokens."""
    theirs = dict(zip(other.positions, other.losses, strict=True))
    start = max(one.method.cache_length, other.method.cache_length)
    pairs = zip(one.positions, one.losses, strict=True)
    both = [loss - theirs[at] for at, loss in pairs if at >= start and at in theirs]
    if len(both) < 2:
        return Gap(float("nan"), float("nan"), len(both))
    ratio = exp(fmean(both))
    return Gap(ratio, ratio * stdev(both) / sqrt(len(both)), len(both))


def curve(one: MethodRun, width: int) -> Iterator[tuple[int, float]]:
    """(middle, perplexity) of consecutive stretches of `width` tokens."""
    for start in range(0, one.positions[-1] + 1, width):
        value = perplexity(one, start, start + width)
        if value == value:
            yield start + width // 2, value
