"""The streaming loop: scores by the oracle, generation by transformers' own, constant memory."""

import gc
import math
import tracemalloc
from itertools import count, islice, pairwise

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from sinkwise.errors import InputError
from sinkwise.streaming.cache import SinkCache
from sinkwise.streaming.loop import stream

from .families import build, expected, texts

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

SINKS, WINDOW = 3, 8


@pytest.mark.parametrize("name", ["llama", "falcon-alibi", "gpt2", "mistral"])
@pytest.mark.parametrize("chunk_length", [1, 7, 64])
def test_scores_are_the_oracles(name: str, chunk_length: int) -> None:
    model, text = build(name), texts(40)[0].tolist()
    with SinkCache(model, WINDOW, SINKS) as cache:
        got = list(stream(model, text, cache=cache, chunk_length=chunk_length))
    want = expected(name, model, text, SINKS, WINDOW).log_softmax(-1)[range(39), text[1:]]
    assert [one.token for one in got] == text and not any(one.generated for one in got)
    assert math.isnan(got[0].log_probability)
    ours = torch.tensor([one.log_probability for one in got[1:]], dtype=torch.float64)
    torch.testing.assert_close(ours, want, rtol=0, atol=1e-4)


def test_greedy_writing_is_generate() -> None:
    model, text = build("llama"), texts(13)
    got = list(stream(model, text[0], cache=SinkCache(model, WINDOW, SINKS), max_new_tokens=20))
    want = model.generate(
        text, past_key_values=SinkCache(model, WINDOW, SINKS), max_new_tokens=20, do_sample=False,
        min_new_tokens=20, pad_token_id=0, eos_token_id=None,
        attention_mask=torch.ones_like(text),
    )  # fmt: skip
    assert [one.token for one in got] == want[0].tolist()
    assert [one.generated for one in got] == [False] * 13 + [True] * 20


def test_sampling_uses_transformers_own_processors() -> None:
    model, text = build("llama"), texts(13)[0].tolist()
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.5), TopKLogitsWarper(4)])

    def run(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        cache = SinkCache(model, WINDOW, SINKS)
        options = {"processors": processors, "sample": True, "generator": generator}
        out = stream(model, text, cache=cache, max_new_tokens=15, **options)
        return [one.token for one in out][13:]

    assert run(1) == run(1) != run(2)
    for step, token in enumerate(run(1)[:4]):
        logits = expected("llama", model, [*text, *run(1)[:step]], SINKS, WINDOW)[-1]
        assert token in logits.topk(4).indices


def test_processors_see_as_much_as_the_cache_holds() -> None:
    model, text, seen = build("llama"), texts(40)[0].tolist(), []

    class Look(RepetitionPenaltyLogitsProcessor):
        def __call__(self, input_ids, scores):  # type: ignore[no-untyped-def]
            seen.append(input_ids[0].tolist())
            return super().__call__(input_ids, scores)

    cache = SinkCache(model, WINDOW, SINKS)
    options = {"max_new_tokens": 2, "processors": LogitsProcessorList([Look(1.3)])}
    got = [one.token for one in stream(model, text, cache=cache, **options)]
    assert seen == [got[-2 - WINDOW - SINKS : -2], got[-1 - WINDOW - SINKS : -1]]


def test_it_stops_notifies_and_continues() -> None:
    model, text, notified = build("llama"), texts(13)[0].tolist(), []
    cache = SinkCache(model, WINDOW, SINKS)
    free = list(stream(model, text, cache=cache, max_new_tokens=20))
    stopper = free[13 + 6].token
    cache.reset()
    got = list(
        stream(
            model, text, cache=cache, max_new_tokens=None, stop={stopper}, callback=notified.append
        )
    )
    first = [one.token for one in free].index(stopper, 13)
    assert got == notified and [one.token for one in got] == [
        one.token for one in free[: first + 1]
    ]
    assert cache.seen.item() == len(got)
    # The next call continues where the last one ended.
    more = texts(9, seed=8)[0].tolist()
    scores = [one.log_probability for one in stream(model, more, cache=cache)]
    whole = [one.token for one in got] + more
    want = expected("llama", model, whole, SINKS, WINDOW).log_softmax(-1)
    assert math.isnan(scores[0])
    ours = torch.tensor(scores[1:], dtype=torch.float64)
    theirs = want[range(len(got), len(whole) - 1), more[1:]]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_an_endless_iterable_in_constant_memory() -> None:
    model = build("llama")
    endless = (5 + number * 7919 % 90 for number in count())
    running = stream(model, endless, cache=SinkCache(model, WINDOW, SINKS), chunk_length=8)
    tracemalloc.start()
    held, tokens = [], 800
    for length in (3000, tokens, tokens, tokens):
        for _ in islice(running, length):
            pass
        gc.collect()
        held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    # What is kept of every token grows in each stretch; other threads allocate in some.
    grown = min(after - before for before, after in pairwise(held))
    assert grown < 16 * tokens  # bytes: less than two numbers a token


def test_its_own_cache_goes_with_it() -> None:
    model = build("llama")
    running = stream(model, [5, 6, 7])
    assert len(list(running)) == 3
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    "tokens, options, match",
    [
        ([5, 97], {}, "token 97 must be at least 0 and below the vocabulary's 97"),
        ([-1], {}, "token -1"),
        ([5], {"chunk_length": 0}, "chunk_length=0"),
        ([5], {"max_new_tokens": -1}, "max_new_tokens=-1"),
        ([], {"max_new_tokens": 1}, "no token to generate from"),
    ],
)
def test_mistakes(tokens: list[int], options: dict[str, int], match: str) -> None:
    model = build("llama")
    with pytest.raises(InputError, match=match):
        list(stream(model, tokens, cache=SinkCache(model, WINDOW, SINKS), **options))


def test_a_batch_is_no_stream() -> None:
    model = build("llama")
    cache = SinkCache(model, WINDOW, SINKS)
    with torch.no_grad():
        model(texts(4, 2), past_key_values=cache)
    with pytest.raises(InputError, match="2 rows"):
        stream(model, [5], cache=cache)
