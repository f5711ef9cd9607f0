"""The sink cache as a transformers cache: generate, turns, beams, roll-backs, and no trace."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from sinkwise.errors import InputError
from sinkwise.streaming.cache import SinkCache

from .families import build, expected, fed, texts

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

SINKS, WINDOW = 3, 8
GREEDY: dict[str, Any] = {
    "do_sample": False,
    "pad_token_id": 0,
    "eos_token_id": None,
    "use_cache": True,
}


def generated(model: Any, tokens: Tensor, cache: Any, new: int, **more: Any) -> Tensor:
    """What `generate` answers with this cache."""
    options = {**GREEDY, **more}
    options.setdefault("attention_mask", torch.ones_like(tokens))
    return model.generate(
        tokens, past_key_values=cache, max_new_tokens=new, min_new_tokens=new, **options
    )


def by_hand(name: str, model: Any, tokens: list[int], new: int) -> list[int]:
    """Greedy continuation by the oracle's logits."""
    out = list(tokens)
    for _ in range(new):
        out.append(int(expected(name, model, out, SINKS, WINDOW)[-1].argmax()))
    return out


@pytest.mark.parametrize("name", ["llama", "gpt-neox", "falcon-alibi", "bloom", "mpt", "gpt2",
    "gemma-3", "gpt-oss", "mistral"])  # fmt: skip
def test_contract_generate_greedy(name: str) -> None:
    model, tokens = build(name), texts(17)
    with SinkCache(model, WINDOW, SINKS) as cache:
        got = generated(model, tokens, cache, 12)
    assert got[0].tolist() == by_hand(name, model, tokens[0].tolist(), 12)


@pytest.mark.parametrize("name", ["llama", "qwen3-sliding", "mpt", "gpt2"])
def test_contract_generate_equals_a_plain_cache_before_the_first_eviction(name: str) -> None:
    model, tokens = build(name), texts(9, 2)
    plain = generated(model, tokens, DynamicCache(config=model.config), 10)
    assert torch.equal(generated(model, tokens, SinkCache(model, 30, 4), 10), plain)


def test_contract_generate_with_left_padding_is_each_row_alone() -> None:
    model, tokens = build("llama"), texts(15, 2)
    mask = torch.ones_like(tokens)
    tokens[1, :6], mask[1, :6] = 0, 0
    together = generated(model, tokens, SinkCache(model, WINDOW, SINKS), 20, attention_mask=mask)
    for row, pads in enumerate((0, 6)):
        one = tokens[row : row + 1, pads:]
        alone = generated(model, one, SinkCache(model, WINDOW, SINKS), 20)
        assert torch.equal(together[row, pads:], alone[0])


def test_contract_turns_of_a_conversation_share_one_cache() -> None:
    model, cache = build("llama"), None
    text = texts(6)
    cache = SinkCache(model, WINDOW, SINKS)
    for turn in range(4):
        text = torch.cat([text, texts(5, seed=turn)], dim=1)
        text = generated(model, text, cache, 7)
    want = expected("llama", model, text[0].tolist(), SINKS, WINDOW)
    own = fed(model, SinkCache(model, WINDOW, SINKS), text, [text.shape[1]])[0]
    torch.testing.assert_close(own.double(), want, rtol=0, atol=1e-4)
    answered = text[0, -7:].tolist()
    assert answered == want[-8:-1].argmax(-1).tolist()
    # The last token was answered and never fed.
    assert cache.seen.tolist() == [text.shape[1] - 1]


def test_contract_sampling_is_that_of_the_logits() -> None:
    model, tokens = build("llama"), texts(17)
    torch.manual_seed(5)
    options = {"do_sample": True, "top_k": 0, "temperature": 0.7}
    got = generated(model, tokens, SinkCache(model, WINDOW, SINKS), 15, **options)
    torch.manual_seed(5)
    cache, out = SinkCache(model, WINDOW, SINKS), tokens
    logits = fed(model, cache, tokens, [17])
    for _ in range(15):
        chosen = torch.multinomial((logits[:, -1] / 0.7).softmax(-1), 1)
        out = torch.cat([out, chosen], dim=1)
        logits = fed(model, cache, chosen, [1])
    assert torch.equal(got, out)


@pytest.mark.parametrize("name", ["llama", "falcon-alibi", "gpt2"])
def test_contract_beam_search_finds_what_a_search_over_the_oracle_finds(name: str) -> None:
    model, tokens, beams, new = build(name), texts(13), 3, 7
    got = generated(model, tokens, SinkCache(model, WINDOW, SINKS), new, num_beams=beams)
    rows = [(0.0, tokens[0].tolist())]
    for _ in range(new):
        longer = []
        for score, row in rows:
            logits = expected(name, model, row, SINKS, WINDOW)[-1].log_softmax(-1)
            best = logits.topk(2 * beams)
            pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            longer += [(score + value, [*row, token]) for value, token in pairs]
        rows = sorted(longer, reverse=True)[:beams]
    assert got[0].tolist() == rows[0][1]


def test_reordered_rows_go_on_as_themselves() -> None:
    model, tokens = build("llama"), texts(30, 3)
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0
    order = torch.tensor([2, 1, 1])
    cache = SinkCache(model, WINDOW, SINKS)
    fed(model, cache, tokens[:, :25], [20, 1, 4], attention_mask=mask[:, :25])
    cache.reorder_cache(order)
    got = fed(model, cache, tokens[:, 25:], [1] * 5)
    for row, old in enumerate(order.tolist()):
        own = torch.cat([tokens[old, 5 * (old == 1) : 25], tokens[row, 25:]]).tolist()
        want = expected("llama", model, own, SINKS, WINDOW)[-5:]
        torch.testing.assert_close(got[row].double(), want, rtol=0, atol=1e-4)


def test_rows_at_the_same_token_with_different_bases() -> None:
    model, tokens = build("llama"), texts(170, 2)
    mask = torch.ones_like(tokens)
    mask[1, :12] = 0  # row 0 is brought back at 139 tokens, when row 1 is at 127
    mask[0, 150:162] = 0
    cache = SinkCache(model, WINDOW, SINKS)
    sizes = [12, 127, 8, 3, 12, *[1] * 8]
    got = fed(model, cache, tokens, sizes, attention_mask=mask)
    base = cache._state.rows.base
    assert base[0] != base[1] and len(set(cache.seen.tolist())) == 1
    for row in range(2):
        real = mask[row].bool()
        want = expected("llama", model, tokens[row][real].tolist(), SINKS, WINDOW)
        ours = got[row].double()[real]
        torch.testing.assert_close(ours, want, rtol=0, atol=1e-4)


def test_rows_are_repeated_and_chosen() -> None:
    model, tokens = build("llama"), texts(25, 2)
    cache = SinkCache(model, WINDOW, SINKS)
    fed(model, cache, tokens[:, :20], [20])
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 4
    cache.batch_select_indices(torch.tensor([1, 3]))
    got = fed(model, cache, tokens[:, 20:], [5])
    for row in range(2):
        want = expected("llama", model, tokens[row].tolist(), SINKS, WINDOW)[-5:]
        torch.testing.assert_close(got[row].double(), want, rtol=0, atol=1e-4)


def test_a_crop_before_the_first_eviction_is_as_if_never_fed() -> None:
    model, tokens = build("llama"), texts(30, 2)
    mask = torch.ones_like(tokens)
    mask[1, :3], mask[1, 8] = 0, 0
    cache = SinkCache(model, WINDOW, SINKS)
    fed(model, cache, tokens[:, :10], [6, 4], attention_mask=mask[:, :10])
    assert cache.is_croppable
    cache.crop(-3)
    assert cache.get_seq_length() == 7 and cache.seen.tolist() == [7, 4]
    cache.crop(5)
    assert cache.get_seq_length() == 5
    got = fed(model, cache, tokens[:, 5:], [25], attention_mask=mask[:, 5:])
    for row in range(2):
        real = mask[row].bool()
        want = expected("llama", model, tokens[row][real].tolist(), SINKS, WINDOW)
        ours = got[row].double()[real[5:]]
        torch.testing.assert_close(ours, want[-len(ours) :], rtol=0, atol=1e-4)


def test_a_crop_after_an_eviction_is_refused() -> None:
    model = build("llama")
    cache = SinkCache(model, WINDOW, SINKS)
    fed(model, cache, texts(12), [12])
    assert not cache.is_croppable
    with pytest.raises(InputError, match="evicted"):
        cache.crop(-1)
    cache.crop(0)
    # Also where the row that lost tokens has gone, and with it what its columns were.
    short = SinkCache(model, WINDOW, SINKS)
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, :5] = 0
    fed(model, short, texts(12, 2), [12], attention_mask=mask)
    short.reorder_cache(torch.tensor([1, 1]))
    with pytest.raises(InputError, match="evicted"):
        short.crop(-1)
    cache.reset()
    fed(model, cache, texts(4), [4])
    with pytest.raises(InputError, match="4 columns"):
        cache.crop(-5)


def test_a_reset_cache_is_a_new_one() -> None:
    model, tokens = build("llama"), texts(30, 2)
    cache = SinkCache(model, WINDOW, SINKS)
    fed(model, cache, texts(40, 3, seed=9), [40])
    cache.reset()
    assert cache.seen.tolist() == [] and not cache.is_initialized
    new = fed(model, SinkCache(model, WINDOW, SINKS), tokens, [30])
    assert torch.equal(fed(model, cache, tokens, [30]), new)


def test_a_copy_goes_its_own_way() -> None:
    model, tokens = build("llama"), texts(40)
    cache = SinkCache(model, WINDOW, SINKS)
    fed(model, cache, tokens[:, :20], [20])
    other = copy.deepcopy(cache)
    fed(model, other, texts(15, seed=8), [15])
    got = fed(model, cache, tokens[:, 20:], [1] * 20)[0]
    want = expected("llama", model, tokens[0].tolist(), SINKS, WINDOW)[20:]
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-4)
    assert (cache.seen.item(), other.seen.item()) == (40, 35)
