"""Small causal language models of every family, and how the oracle is to see their layers."""

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.oracles.positions import Layer, position_logits

VOCABULARY = 97
_SIZES = dict(  # noqa: C408
    vocab_size=VOCABULARY, hidden_size=48, num_hidden_layers=2, num_attention_heads=6,
    intermediate_size=56, max_position_embeddings=64, pad_token_id=0, bos_token_id=1,
    eos_token_id=2,
)  # fmt: skip
_GROUPED = {**_SIZES, "num_key_value_heads": 3, "head_dim": 8}
_MOE = {"num_local_experts": 3, "num_experts_per_tok": 2}
_HYBRID = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}


def _scaling(**given: Any) -> dict[str, Any]:
    return {**_GROUPED, "rope_scaling": {"rope_theta": 10000.0, **given}}


@dataclass(frozen=True)
class Family:
    """A model class, its configuration, and what the oracle needs to know."""

    model: str
    config: dict[str, Any]
    kernel: str = "sdpa"
    positions: str = "rotary"
    interleaved: bool = False
    windows: tuple[int | None, ...] = (None, None)
    speeds: tuple[str, ...] = field(default=("", ""))
    """Of hybrid models: which frequencies each layer has."""
    exact: bool = True
    """False where the model's own softmax is in float32, which bounds what float64 can show."""


FAMILIES = {
    "llama": Family("LlamaForCausalLM", _GROUPED),
    "llama-eager": Family("LlamaForCausalLM", _GROUPED, kernel="eager", exact=False),
    "llama-3": Family("LlamaForCausalLM", _scaling(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=32)),
    "llama-yarn": Family("LlamaForCausalLM", _scaling(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=16)),
    "llama-linear": Family("LlamaForCausalLM", _scaling(rope_type="linear", factor=2.0)),
    "mistral": Family("MistralForCausalLM", {**_GROUPED, "sliding_window": 5}, windows=(5, 5)),
    "mistral-long": Family("MistralForCausalLM", {**_GROUPED, "sliding_window": 4096}),
    "qwen2": Family("Qwen2ForCausalLM", _GROUPED),
    "qwen3": Family("Qwen3ForCausalLM", _GROUPED),
    "qwen3-sliding": Family("Qwen3ForCausalLM", {**_GROUPED, "use_sliding_window": True,
        "sliding_window": 5, "max_window_layers": 1}, windows=(None, 5)),
    "qwen3-wide": Family("Qwen3ForCausalLM", {**_GROUPED, "use_sliding_window": True,
        "sliding_window": 37, "max_window_layers": 1}, windows=(None, 37)),
    "phi-3": Family("Phi3ForCausalLM", _GROUPED),
    "gpt-neox": Family("GPTNeoXForCausalLM", {**_SIZES, "hidden_size": 96}),
    "phi": Family("PhiForCausalLM", {**_SIZES, "partial_rotary_factor": 0.5}),
    "falcon": Family("FalconForCausalLM", {**_SIZES, "alibi": False}),
    "falcon-new": Family("FalconForCausalLM", {**_SIZES, "new_decoder_architecture": True,
        "num_kv_heads": 3, "alibi": False}),
    "falcon-alibi": Family("FalconForCausalLM", {**_SIZES, "alibi": True, "multi_query": False},
        positions="bias"),
    "falcon-alibi-eager": Family("FalconForCausalLM", {**_SIZES, "alibi": True,
        "multi_query": False}, kernel="eager", positions="bias"),
    "mpt": Family("MptForCausalLM", {"vocab_size": VOCABULARY, "d_model": 48, "n_layers": 2,
        "n_heads": 6, "max_seq_len": 64}, kernel="eager", positions="bias", exact=False),
    "bloom": Family("BloomForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 48, "n_layer": 2,
        "n_head": 6}, kernel="eager", positions="bias", exact=False),
    "gpt2": Family("GPT2LMHeadModel", {"vocab_size": VOCABULARY, "n_embd": 48, "n_layer": 2,
        "n_head": 6, "n_positions": 64}, positions="learned"),
    "gpt2-eager": Family("GPT2LMHeadModel", {"vocab_size": VOCABULARY, "n_embd": 48, "n_layer": 2,
        "n_head": 6, "n_positions": 64}, kernel="eager", positions="learned"),
    "opt": Family("OPTForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 48, "ffn_dim": 56,
        "num_hidden_layers": 2, "num_attention_heads": 6, "max_position_embeddings": 64,
        "word_embed_proj_dim": 48}, positions="learned"),
    "gemma-2": Family("Gemma2ForCausalLM", {**_GROUPED, **_HYBRID, "attn_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 8}, kernel="eager", windows=(5, None), exact=False),
    "gemma-3": Family("Gemma3ForCausalLM", {**_GROUPED, **_HYBRID}, windows=(5, None),
        speeds=("local", "global")),
    "gpt-oss": Family("GptOssForCausalLM", {**_GROUPED, **_MOE, **_HYBRID,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 150000.0,
                         "original_max_position_embeddings": 16}},
        kernel="eager", windows=(5, None)),
    "cohere": Family("CohereForCausalLM", {**_GROUPED, "logit_scale": 1.0}, interleaved=True),
    "glm-4": Family("Glm4ForCausalLM", {**_GROUPED, "partial_rotary_factor": 0.5},
        interleaved=True),
    "olmo-2": Family("Olmo2ForCausalLM", _GROUPED),
}  # fmt: skip


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 11) -> Any:
    """The model in eval mode, with weights so large that attention is far from uniform."""
    family = FAMILIES[name]
    cls = getattr(transformers, family.model, None)
    if cls is None:
        pytest.skip(f"this transformers has no {family.model}")
    torch.manual_seed(seed)
    config = cls.config_class(**copy.deepcopy(family.config))
    if family.model.startswith("GptOss"):
        config._experts_implementation = "eager"
    model = cls._from_config(config, attn_implementation=family.kernel)
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            if parameter.dim() < 2:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif "embed" not in label and "wte" not in label and "lm_head" not in label:
                parameter.mul_(6.0)
    return model.to(dtype).eval()


def layers(name: str, model: Any) -> list[Layer]:
    """The oracle's view of the model's layers."""
    family = FAMILIES[name]
    if family.positions != "rotary":
        return [Layer(window=window) for window in family.windows]
    found = {
        label: buffer.double()
        for label, buffer in model.named_buffers()
        if label.endswith("inv_freq") and "original" not in label
    }
    out = []
    for kind, window in zip(family.speeds, family.windows, strict=True):
        marks = {"local": ("sliding", "local"), "global": ("full", "rotary_emb.inv")}.get(kind)
        speed = [
            value
            for label, value in found.items()
            if marks is None or any(mark in label for mark in marks)
        ]
        assert len(speed) == 1, found.keys()
        out.append(Layer(speed[0], family.interleaved, window))
    return out


def expected(name: str, model: Any, tokens: list[int], sinks: int, window: int) -> Tensor:
    """Logits of one text by the oracle, in float64."""
    exact = copy.deepcopy(model).double()
    family = FAMILIES[name]
    return position_logits(exact, tokens, sinks, window, layers(name, exact), family.positions)


def texts(length: int, batch: int = 1, seed: int = 3) -> Tensor:
    """Rows of token ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, VOCABULARY, (batch, length), generator=generator)


@torch.no_grad()
def fed(model: Any, cache: Any, tokens: Tensor, sizes: list[int], **more: Any) -> Tensor:
    """Logits of the tokens, given to the model in chunks of these sizes."""
    out, start = [], 0
    for size in sizes:
        part = tokens[:, start : start + size]
        given = {key: value[:, start : start + size] for key, value in more.items()}
        out.append(model(part, past_key_values=cache, **given).logits)
        start += size
    assert start == tokens.shape[1]
    return torch.cat(out, dim=1)
