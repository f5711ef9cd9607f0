"""What a sink cache refuses, and that it says why."""

from typing import Any

import pytest
import torch
import transformers

from sinkwise.core.retention import Retention
from sinkwise.errors import InputError
from sinkwise.streaming.cache import SinkCache

from .families import build, expected, fed, texts
from .test_cache import hooks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

OLD = transformers.__version__.startswith("4.")
SINKS, WINDOW = 3, 8


def test_what_cannot_be_right_is_refused() -> None:
    model, tokens = build("llama"), texts(30)
    cache = SinkCache(model, WINDOW, SINKS)

    def refused(match: str, **given: Any) -> None:
        with torch.no_grad(), pytest.raises(InputError, match=match):
            model(**{"input_ids": tokens, "past_key_values": cache, **given})

    refused("use_cache=True as well", use_cache=False)
    refused("makes its own masks", attention_mask=torch.ones(1, 1, 30, 30))
    refused("makes its own masks", attention_mask=torch.ones(2, 30))
    refused("29 columns; it must have 30", attention_mask=torch.ones(1, 29))
    refused("at most 16 tokens at a time", output_attentions=True)
    fed(model, cache, tokens, [30])
    refused("29 columns; it must have 30 .* or 60", attention_mask=torch.ones(1, 29))
    refused("2 rows and the cache holds 1", input_ids=tokens.repeat(2, 1))
    with torch.enable_grad(), pytest.raises(InputError, match="call model"):
        model.train()(tokens, past_key_values=cache)
    model.eval()
    with pytest.raises(InputError, match="not attached"):
        fed(build("llama"), cache, tokens, [30])
    model.config._attn_implementation = "flash_attention_2"
    refused("takes no mask", attention_mask=torch.ones(1, 30).tril(-1))
    assert hooks(model) == 2 and cache._attachment.call is None


@pytest.mark.parametrize("given", [{"window_length": 0}, {"num_sink_tokens": -1},
    {"num_sink_tokens": True}], ids=str)  # fmt: skip
def test_sizes_that_are_none(given: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(given))):
        SinkCache(build("llama"), **given)


def test_a_size_that_is_no_integer() -> None:
    sizes = object.__new__(Retention)  # past the type checker of the tests
    object.__setattr__(sizes, "num_sink_tokens", 4)
    object.__setattr__(sizes, "window_length", 8.0)
    with pytest.raises(InputError, match=r"window_length=8\.0"):
        sizes.__post_init__()


def scaled(**scaling: Any) -> Any:
    """A Llama or Phi with that rotary scaling."""
    kind = "Phi3" if scaling.get("type") == "longrope" else "Llama"
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=97, hidden_size=48, num_hidden_layers=2, num_attention_heads=6,
        intermediate_size=56, max_position_embeddings=2048, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, original_max_position_embeddings=600,
        rope_scaling=scaling if OLD else {"rope_theta": 10000.0, **scaling},
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def test_dynamic_scaling_is_refused_and_says_why() -> None:
    with pytest.raises(InputError, match="depend on how long"):
        SinkCache(scaled(rope_type="dynamic", factor=2.0), WINDOW, SINKS)


def test_longrope_up_to_the_length_at_which_it_changes() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    more = {} if OLD else {"rope_type": "longrope", "original_max_position_embeddings": 600}
    model = scaled(type="longrope", **factors, **more)
    with pytest.raises(InputError, match="LongRoPE"):
        SinkCache(model, 300, SINKS)
    tokens = texts(900)
    single = fed(model, SinkCache(model, 12, SINKS), tokens, [1] * 900)
    chunks = fed(model, SinkCache(model, 12, SINKS), tokens, [900])
    torch.testing.assert_close(single, chunks, rtol=0, atol=1e-4)


def test_learned_positions_bound_the_cache() -> None:
    with pytest.raises(InputError, match="64 positions"):
        SinkCache(build("gpt2"), 62, SINKS)
    model, tokens = build("gpt2"), texts(80)
    want = expected("gpt2", model, tokens[0].tolist(), SINKS, 61)
    for sizes in ([80], [1] * 80):
        got = fed(model, SinkCache(model, 61, SINKS), tokens, sizes)[0]
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-4)


def test_models_whose_keys_stand_nowhere_known_are_refused() -> None:
    from ..models import build as other

    for name, match in (
        ("bart-sdpa", "encoder"), ("vit-sdpa", "no attention layers"),
        ("qwen3-next-sdpa", "linear_attention"), ("gpt-j-eager", "neither rotary"),
        ("gpt-neo-eager", "no attention"), ("jamba-sdpa", "kind"),
        ("bert-sdpa", "encoder"),
        ("llama-4-sdpa", "chunked_attention"),
        ("deepseek-v3-sdpa", "does not explain"),
    ):  # fmt: skip
        if OLD and name.startswith("deepseek"):
            continue  # there it has ordinary keys
        with pytest.raises(InputError, match=match):
            SinkCache(other(name)[0], WINDOW, SINKS)


def test_layers_that_slide_say_so() -> None:
    assert SinkCache(build("gemma-3"), 8, 3).layer_kinds == ["sliding window", "sinks + window"]
    assert SinkCache(build("mistral"), 8, 3).layer_kinds == ["sliding window"] * 2
    assert SinkCache(build("mistral-long"), 8, 3).layer_kinds == ["sinks + window"] * 2
    assert "sliding, Retention(num_sink_tokens=0, window_length=5)" in repr(
        SinkCache(build("mistral"), 8, 3).layers[0]
    )
