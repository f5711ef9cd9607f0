"""The hooks of a sink cache: what they do to a call, and that they leave no trace."""

import copy
import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from sinkwise.errors import InputError
from sinkwise.streaming.attachment import Attachment
from sinkwise.streaming.cache import SinkCache

from .families import build, expected, fed, texts

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

SINKS, WINDOW = 3, 8


def hooks(model: nn.Module) -> int:
    """Hooks of all kinds on all modules."""
    return sum(
        len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()
    )


@pytest.mark.parametrize("name", ["llama", "bloom", "gemma-3"])
def test_no_trace_is_left(name: str) -> None:
    model, tokens = build(name), texts(20, 2)
    keys, attributes = list(model.state_dict()), {n: set(vars(m)) for n, m in model.named_modules()}
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0
    plain = fed(model, DynamicCache(), tokens, [20], attention_mask=mask)
    with SinkCache(model, WINDOW, SINKS) as cache:
        attached = hooks(model)
        assert attached == 2
        fed(model, cache, tokens, [20], attention_mask=mask)
        assert hooks(model) == attached
        # Calls that carry another cache, or none, are not touched.
        again = fed(model, DynamicCache(), tokens, [20], attention_mask=mask)
        assert torch.equal(again, plain)
    assert hooks(model) == 0
    assert list(model.state_dict()) == keys
    assert {n: set(vars(m)) for n, m in model.named_modules()} == attributes
    with pytest.raises(InputError, match="closed"):
        fed(model, cache, tokens, [20])


def test_two_caches_on_one_model_do_not_meet() -> None:
    model, tokens = build("llama"), texts(40)
    one, two = SinkCache(model, WINDOW, SINKS), SinkCache(model, 5, 1)
    parts = []
    for token in range(40):
        parts.append(
            [fed(model, cache, tokens[:, token : token + 1], [1])[0] for cache in (one, two)]
        )
    for number, (sinks, window) in enumerate(((SINKS, WINDOW), (1, 5))):
        want = expected("llama", model, tokens[0].tolist(), sinks, window)
        got = torch.cat([pair[number] for pair in parts])
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-4)
    two.close()
    assert hooks(model) == 2


def test_a_collected_cache_leaves_the_model() -> None:
    model = build("llama")
    cache = SinkCache(model, WINDOW, SINKS)
    fed(model, cache, texts(20), [20])
    assert hooks(model) == 2
    del cache
    gc.collect()
    assert hooks(model) == 0


def test_a_cache_that_its_model_refers_to_is_collected_with_it() -> None:
    model = build("llama")
    model.model.cache = SinkCache(model, WINDOW, SINKS)
    known = weakref.ref(model.model.cache)
    del model
    gc.collect()
    assert known() is None


def test_a_copied_model_has_no_copy_of_the_cache() -> None:
    model = build("llama")
    cache = SinkCache(model, WINDOW, SINKS)
    fed(model, cache, texts(20), [20])
    attachments = [one for one in gc.get_objects() if isinstance(one, Attachment)]
    other = copy.deepcopy(model)
    gc.collect()
    assert [one for one in gc.get_objects() if isinstance(one, Attachment)] == attachments
    plain = fed(model, DynamicCache(), texts(20), [20])
    assert torch.equal(fed(other, DynamicCache(), texts(20), [20]), plain)


@pytest.mark.parametrize("way", ["close", "reset", "with", "collect", "next call"])
@pytest.mark.parametrize("name", ["bloom", "llama"])
def test_an_interrupted_call_leaves_no_hooks(name: str, way: str) -> None:
    """torch runs no hook after a KeyboardInterrupt: whatever is done next removes them."""
    model, tokens = build(name), texts(12, 2)
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0  # padding needs hooks on every attention module
    with torch.no_grad():
        plain = model(tokens).logits

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    cache: SinkCache | None = SinkCache(model, WINDOW, SINKS)
    assert cache is not None
    handle = cache.decoder.attention[-1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), cache if way == "with" else nullcontext():
        fed(model, cache, tokens, [12], attention_mask=mask)
    handle.remove()
    if way != "with":
        assert hooks(model) > 2
    left = {"close": 0, "reset": 2, "with": 0, "collect": 0, "next call": 2}[way]
    if way == "close":
        cache.close()
    elif way == "reset":
        cache.reset()
        fed(model, cache, tokens, [12], attention_mask=mask)
    elif way == "collect":
        cache = None
        gc.collect()
    elif way == "next call":
        with pytest.raises(InputError, match="failed before its end"):
            fed(model, cache, tokens, [12])
    assert hooks(model) == left
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, plain)


def test_a_failed_call_is_reported_and_leaves_no_hooks() -> None:
    model = build("bloom")
    cache = SinkCache(model, WINDOW, SINKS)
    fed(model, cache, texts(10), [10])
    handle = model.transformer.h[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fed(model, cache, texts(1), [1])
    handle.remove()
    assert hooks(model) == 2 and cache._attachment.call is None
    with pytest.raises(InputError, match="failed before its end"):
        fed(model, cache, texts(1), [1])
    cache.reset()
    fed(model, cache, texts(10), [10])


def test_hidden_states_of_a_split_call_are_joined() -> None:
    model, tokens = build("llama"), texts(60)
    cache = SinkCache(model, WINDOW, SINKS)
    with torch.no_grad():
        out = model(tokens, past_key_values=cache, output_hidden_states=True)
        single = SinkCache(model, WINDOW, SINKS)
        steps = [
            model(tokens[:, t : t + 1], past_key_values=single, output_hidden_states=True)
            for t in range(60)
        ]
    assert [part.shape for part in out.hidden_states] == [(1, 60, 48)] * 3
    for layer in range(3):
        one = torch.cat([step.hidden_states[layer] for step in steps], dim=1)
        torch.testing.assert_close(out.hidden_states[layer], one, rtol=0, atol=1e-4)


def test_embeddings_instead_of_tokens() -> None:
    model, tokens = build("llama"), texts(40)
    want = fed(model, SinkCache(model, WINDOW, SINKS), tokens, [40])
    with torch.no_grad():
        embedded = model.get_input_embeddings()(tokens)
        cache = SinkCache(model, WINDOW, SINKS)
        got = model(inputs_embeds=embedded, past_key_values=cache).logits
    torch.testing.assert_close(got, want)
