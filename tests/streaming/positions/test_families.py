"""Every family gives with a sink cache what the oracle gives: at cache positions, at every step."""

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

from sinkwise.streaming.cache import SinkCache
from tests.oracles.positions import llama_logits

from ..families import FAMILIES, build, expected, fed, texts

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

SINKS, WINDOW, LENGTH = 3, 8, 47


def close(ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    """Equal within the tolerance; and the logits are not trivially small."""
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", FAMILIES)
def test_contract_float32(name: str) -> None:
    model, tokens = build(name), texts(LENGTH)
    want = expected(name, model, tokens[0].tolist(), SINKS, WINDOW)
    for sizes in ([1] * LENGTH, [LENGTH], [9, 7, 1, 1, 13, 1, 15]):
        cache = SinkCache(model, WINDOW, SINKS)
        close(fed(model, cache, tokens, sizes)[0], want, 1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_float64(name: str) -> None:
    model, tokens = build(name, torch.float64), texts(LENGTH)
    if name == "mpt" and transformers.__version__.startswith("4."):
        pytest.skip("transformers 4 overflows in MPT's own float64 mask")
    want = expected(name, model, tokens[0].tolist(), SINKS, WINDOW)
    for sizes in ([1] * LENGTH, [9, 7, 1, 1, 13, 1, 15]):
        cache = SinkCache(model, WINDOW, SINKS)
        tolerance = 1e-8 if FAMILIES[name].exact else 1e-5
        close(fed(model, cache, tokens, sizes)[0], want, tolerance)


@pytest.mark.parametrize("name", FAMILIES)
def test_contract_left_padding(name: str) -> None:
    model, pads = build(name), (0, 6, 11)
    tokens = texts(LENGTH, len(pads))
    mask = torch.ones_like(tokens)
    for row, pad in enumerate(pads):
        tokens[row, :pad], mask[row, :pad] = 0, 0
    for sizes in ([12] + [1] * (LENGTH - 12), [LENGTH], [13, 7, 1, 11, 15]):
        cache = SinkCache(model, WINDOW, SINKS)
        got = fed(model, cache, tokens, sizes, attention_mask=mask)
        for row, pad in enumerate(pads):
            want = expected(name, model, tokens[row, pad:].tolist(), SINKS, WINDOW)
            close(got[row, pad:], want, 1e-4)
        assert cache.seen.tolist() == [LENGTH - pad for pad in pads]


@pytest.mark.parametrize("name", FAMILIES)
def test_contract_a_plain_cache_before_the_first_eviction(name: str) -> None:
    model, tokens = build(name), texts(23, 2)
    for sizes in ([23], [9, 1, 1, 5, 7]):
        plain = fed(model, DynamicCache(config=model.config), tokens, sizes)
        ours = fed(model, SinkCache(model, 20, 3), tokens, sizes)
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-6)


def test_the_oracles_agree() -> None:
    model, tokens = build("llama"), texts(LENGTH)[0].tolist()
    by_hand = llama_logits(model, tokens, SINKS, WINDOW)
    close(expected("llama", model, tokens, SINKS, WINDOW), by_hand, 1e-6)


def test_the_oracle_tells_sinks_from_none() -> None:
    model, tokens = build("llama"), texts(LENGTH)[0].tolist()
    want = expected("llama", model, tokens, SINKS, WINDOW)
    other = expected("llama", model, tokens, SINKS - 1, WINDOW + 1)
    assert (want - other)[WINDOW + SINKS :].abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_thousands_of_tokens_and_many_rebases_do_not_drift(dtype: torch.dtype) -> None:
    model, tokens = build("llama", dtype), texts(3000)
    reference = build("llama", dtype).double()
    want = llama_logits(reference, tokens[0].tolist(), SINKS, WINDOW)
    got = fed(model, SinkCache(model, WINDOW, SINKS), tokens, [1] * 1000 + [2000])[0].double()
    early, late = ((got - want)[part].abs().max() for part in (slice(20, 150), slice(-500, None)))
    assert late < {torch.float32: 1e-4, torch.bfloat16: 0.6, torch.float16: 0.06}[dtype]
    assert late < 3 * early
