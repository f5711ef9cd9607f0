"""Which positions a sink cache supports, up to which length, and what it refuses."""

from typing import Any

import pytest
import torch
import transformers

from sinkwise.errors import InputError
from sinkwise.streaming.cache import SinkCache

from ..families import build, expected, fed, texts

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

OLD = transformers.__version__.startswith("4.")
SINKS, WINDOW = 3, 8


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


def test_models_with_unknown_positions_are_refused() -> None:
    from tests.models import build as other

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
