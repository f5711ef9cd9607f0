"""Scoring and generation over any number of tokens, in constant memory."""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import LogitsProcessorList

from sinkwise.errors import InputError
from sinkwise.streaming.cache import SinkCache


@dataclass(frozen=True)
class StreamedToken:
    """One token of an endless text."""

    token: int
    """Its id."""
    log_probability: float
    """ln p(token | cache) from the model's own logits; NaN for the first token."""
    generated: bool
    """Whether the model generated it; else it was given."""


def stream(
    model: nn.Module,
    tokens: Iterable[Any],
    *,
    cache: SinkCache | None = None,
    max_new_tokens: int | None = 0,
    stop: Collection[int] = (),
    processors: LogitsProcessorList | None = None,
    sample: bool = False,
    generator: torch.Generator | None = None,
    chunk_length: int = 64,
    callback: Callable[[StreamedToken], Any] | None = None,
) -> Iterator[StreamedToken]:
    r"""Score the given token ids, then generate; yields every token with its log-probability.

    The log-probability of token $t$ is $\ln p(x_t)$ given the sinks and the window before it.
    The perplexity of a text follows from it:

    >>> log_p = [one.log_probability for one in stream(model, ids)]        # doctest: +SKIP
    >>> perplexity = math.exp(-sum(log_p[1:]) / (len(log_p) - 1))          # doctest: +SKIP

    `tokens` may be endless, and so may the generation (`max_new_tokens=None`; then `stop` or the
    caller ends it): only the cache and a history of the cache's length are kept.

    Given tokens are fed `chunk_length` at a time; their scores do not depend on it. Generation
    takes the most probable token, or with `sample=True` draws one with `generator`. `processors`
    are those of transformers (temperature, top-p, repetition penalty, …); they get the history.

    Without `cache`, a `SinkCache(model)` is made and closed at the end. With one, the text
    continues from the cache's state, and the last generated token is fed to it as well.

    Raises InputError for an id outside the vocabulary, a chunk length below 1, a negative number of
    new tokens, a generation without any token to start from, and a cache with more than one row.

    Reference: Xiao et al., 2023, arXiv 2309.17453.
    """
    if chunk_length < 1:
        raise InputError(f"chunk_length={chunk_length} must be at least 1")
    if max_new_tokens is not None and max_new_tokens < 0:
        raise InputError(
            f"max_new_tokens={max_new_tokens} must be at least 0, or None for no limit"
        )
    if cache is not None and cache.batch_size > 1:
        raise InputError(
            f"the cache holds {cache.batch_size} rows; stream() needs a cache of one row"
        )
    options = (processors or LogitsProcessorList(), sample, generator)
    return _generate(model, tokens, cache, max_new_tokens, stop, options, chunk_length, callback)


def _generate(
    model: Any,
    tokens: Iterable[Any],
    given: SinkCache | None,
    limit: int | None,
    stop: Collection[int],
    options: tuple[LogitsProcessorList, bool, torch.Generator | None],
    chunk_length: int,
    callback: Callable[[StreamedToken], Any] | None,
) -> Iterator[StreamedToken]:
    with SinkCache(model) if given is None else nullcontext(given) as cache:
        feed = _Feed(model, cache)
        pending = iter(tokens)
        while chunk := [int(token) for token in islice(pending, chunk_length)]:
            for one in feed.score(chunk):
                _call_back(callback, one)
                yield one
        written = 0
        while limit is None or written < limit:
            one = feed.generate(*options)
            _call_back(callback, one)
            yield one
            written += 1
            if one.token in stop:
                return


def _call_back(callback: Callable[[StreamedToken], Any] | None, one: StreamedToken) -> None:
    if callback is not None:
        callback(one)


class _Feed:
    """A model, its cache, and the logits after the last token."""

    def __init__(self, model: Any, cache: SinkCache) -> None:
        self.model, self.cache = model, cache
        self.vocabulary = model.get_input_embeddings().num_embeddings
        self.device = model.get_input_embeddings().weight.device
        self.logits: Float[Tensor, " vocabulary"] | None = None
        self.history: deque[int] = deque(maxlen=cache.retention.capacity)

    def score(self, chunk: list[int]) -> list[StreamedToken]:
        """Feed given tokens; each is scored by the logits before it."""
        for token in chunk:
            if not 0 <= token < self.vocabulary:
                raise InputError(
                    f"token {token} must be at least 0 and below the vocabulary's {self.vocabulary}"
                )
        before, after = self.logits, self._forward(chunk)
        first = math.nan if before is None else _score(before, chunk[0])
        scores = after[:-1].log_softmax(-1)[range(len(chunk) - 1), chunk[1:]].tolist()
        return [
            StreamedToken(token, score, generated=False)
            for token, score in zip(chunk, [first, *scores], strict=True)
        ]

    def generate(
        self, processors: LogitsProcessorList, sample: bool, generator: torch.Generator | None
    ) -> StreamedToken:
        """Choose the next token and feed it."""
        if self.logits is None:
            raise InputError("there is no token to generate from; give at least one in tokens")
        seen = torch.tensor([list(self.history)], device=self.device)
        scores: Any = processors(seen, self.logits[None].clone())  # type: ignore[arg-type]
        if sample:
            token = int(torch.multinomial(scores[0].softmax(-1), 1, generator=generator))
        else:
            token = int(scores[0].argmax())
        one = StreamedToken(token, _score(self.logits, token), generated=True)
        self._forward([token])
        return one

    @torch.no_grad()
    def _forward(self, ids: list[int]) -> Float[Tensor, "token vocabulary"]:
        given = torch.tensor([ids], device=self.device)
        name = self.cache.decoder.cache_argument
        out = self.model(input_ids=given, use_cache=True, **{name: self.cache}).logits[0].float()
        self.logits = out[-1]
        self.history.extend(ids)
        return out


def _score(logits: Float[Tensor, " vocabulary"], token: int) -> float:
    return float(logits.log_softmax(-1)[token])
