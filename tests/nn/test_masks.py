"""Masks and the sink token against the cache and by hand."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from sinkwise.errors import InputError
from sinkwise.nn.masks import sink_mask, sink_mask_function
from sinkwise.nn.sink_token import SinkToken
from sinkwise.streaming.cache import SinkCache

from ..streaming.families import build, fed, texts

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

SIZES = [(1, 0), (1, 3), (7, 0), (7, 3), (40, 5)]


@pytest.mark.parametrize("window, sinks", SIZES)
def test_the_mask_by_counting(window: int, sinks: int) -> None:
    mask = sink_mask(23, window, sinks)
    for query in range(23):
        seen = [key for key in range(query + 1) if key < sinks or query - key < window]
        assert mask[query].nonzero()[:, 0].tolist() == seen


@pytest.mark.parametrize("window, sinks", SIZES)
def test_it_gives_what_the_cache_gives_to_a_model_without_positions(
    window: int, sinks: int
) -> None:
    model, tokens = build("llama"), texts(37)
    model.model.rotary_emb.inv_freq.zero_()
    cached = fed(model, SinkCache(model, window, sinks), tokens, [37])
    hidden = torch.zeros(37, 37).masked_fill(~sink_mask(37, window, sinks), float("-inf"))
    with torch.no_grad():
        masked = model(tokens, attention_mask=hidden[None, None]).logits
    torch.testing.assert_close(masked, cached, rtol=0, atol=1e-4)


def test_flex_attention_and_transformers_take_the_function() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 37, 16)
    rule, mask = sink_mask_function(7, 3), sink_mask(37, 7, 3)
    blocks = create_block_mask(rule, None, None, 37, 37, device="cpu")
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=blocks), want)

    import inspect

    from transformers.masking_utils import create_causal_mask

    model = build("llama-eager")
    names = inspect.signature(create_causal_mask).parameters
    given = {
        "config": model.config, "attention_mask": None, "and_mask_function": rule,
        "inputs_embeds" if "inputs_embeds" in names else "input_embeds": torch.zeros(1, 37, 48),
        "cache" if "cache" in names else "past_key_values": None,
        "cache_position": torch.arange(37),
    }  # fmt: skip
    made = create_causal_mask(**{name: value for name, value in given.items() if name in names})
    assert torch.equal(made[0, 0] == 0, mask)


def test_sizes_that_are_none() -> None:
    with pytest.raises(InputError, match="window_length=0"):
        sink_mask_function(0, 1)
    with pytest.raises(InputError, match="num_sink_tokens=-1"):
        sink_mask(5, 1, -1)


def test_the_sink_token_stands_first_and_learns() -> None:
    torch.manual_seed(0)
    token, x = SinkToken(5), torch.randn(2, 3, 5)
    out = token(x)
    assert out.shape == (2, 4, 5) and torch.equal(out[:, 1:], x)
    assert torch.equal(out[0, 0], token.vector) and torch.equal(out[1, 0], token.vector)
    assert torch.equal(token.without(out), x)
    out.sum().backward()
    assert token.vector.grad is not None and (token.vector.grad == 2).all()
    assert token(x.bfloat16()).dtype == torch.bfloat16
