"""The keys themselves: where they stand, how exactly, and what a step does to them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sinkwise.streaming.cache import SinkCache
from tests.oracles.positions import cache_positions, rotate

from .families import build, fed, texts

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

SINKS, WINDOW = 3, 8
CAPACITY = SINKS + WINDOW


@torch.no_grad()
def raw(model: Any, tokens: Tensor) -> Tensor:
    """Un-rotated keys of layer 0, by its own weights: (batch, head, token, head_dim)."""
    layer = model.model.layers[0]
    hidden = layer.input_layernorm(model.model.embed_tokens(tokens))
    return layer.self_attn.k_proj(hidden).unflatten(-1, (-1, 8)).transpose(1, 2)


def by_cache_position(model: Any, tokens: Tensor) -> Tensor:
    """What is kept of them, each rotated for its cache position."""
    kept, position = cache_positions(tokens.shape[1] - 1, SINKS, WINDOW)
    speed = model.model.rotary_emb.inv_freq.double()
    angles = torch.tensor(position, dtype=torch.float64)[:, None] * speed
    return rotate(raw(model, tokens).double()[:, :, kept], angles, False)


def stored(cache: SinkCache, count: int) -> Tensor:
    """The buffer in the order of cache positions, rotated so that the query is at its own."""
    layer = cache.layers[0]
    assert layer.keys is not None and layer.rotary is not None
    kept, _ = cache_positions(count - 1, SINKS, WINDOW)
    slots = [j if j < SINKS else SINKS + (j - SINKS) % WINDOW for j in kept]
    keys = layer.keys[:, :, slots].double()
    at = count - 1 - cache._state.rows.base[0]
    return layer.rotary.rotate(keys, torch.tensor(len(kept) - 1 - at))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 3e-5),
    (torch.bfloat16, 3e-2), (torch.float16, 4e-3)], ids=str)  # fmt: skip
def test_every_key_is_rotated_by_its_cache_position(dtype: torch.dtype, tolerance: float) -> None:
    model, tokens = build("llama", dtype), texts(30 * WINDOW + 300)
    cache = SinkCache(model, WINDOW, SINKS)
    for step in range(tokens.shape[1]):
        fed(model, cache, tokens[:, step : step + 1], [1])
        if step % 29 < 2:  # early, at evictions, and after every rebase
            want = by_cache_position(model, tokens[:, : step + 1])
            off = (stored(cache, step + 1) - want).norm(dim=-1) / want.norm(dim=-1)
            # A stored key is rounded when it comes and at most twice more at rebases.
            assert float(off.max()) < tolerance, (step, float(off.max()))
    assert cache._state.rows.base[0] > 0


def test_a_step_moves_no_key_and_copies_no_cache() -> None:
    model = build("llama")
    cache = SinkCache(model, WINDOW, SINKS)
    fed(model, cache, texts(40), [40])
    layer = cache.layers[0]
    assert layer.keys is not None and layer.values is not None
    where, before = layer.keys.data_ptr(), layer.keys.clone()
    fed(model, cache, texts(1), [1])
    assert layer.keys.data_ptr() == where and layer.keys.shape[2] == CAPACITY
    changed = (layer.keys != before).any(-1).any(1)[0].nonzero()[:, 0].tolist()
    assert changed == [0, 1, 2, SINKS + (40 - SINKS) % WINDOW]


def test_sinks_are_kept_in_full_precision() -> None:
    model = build("llama", torch.bfloat16)
    cache = SinkCache(model, WINDOW, SINKS)
    fed(model, cache, texts(40), [40])
    assert cache.layers[0].sinks is not None
    assert cache.layers[0].sinks.dtype == torch.float32
    first = cache.layers[0].sinks.clone()
    fed(model, cache, texts(400), [400])
    assert torch.equal(cache.layers[0].sinks, first)


def test_buffers_grow_with_the_text_up_to_the_cache() -> None:
    model = build("llama")
    cache = SinkCache(model, 300, 4)
    rows = []
    for size in (3, 62, 100, 300, 1):
        fed(model, cache, texts(size), [size])
        rows.append(cache.layers[0].get_seq_length())
    assert rows == [64, 128, 256, 304, 304]
    assert cache.layers[0].get_max_length() == 304
    assert (cache.get_max_length(), cache.get_max_cache_shape()) == (-1, -1)
