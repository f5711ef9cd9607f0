"""transformers: encoders, decoders, both, towers; SDPA and eager where the model has both."""
# ruff: noqa: C408

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from .case import BATCH, IMAGE, PATCH, VOCABULARY, add, ids, padded, pixels

_CLS, _REG = ("cls",), "register"


def _hf(name: str, model: str, config: dict[str, Any], layers=(0, 1), **given: Any) -> None:
    """`model` from `config` (a nested dict for nested configurations), as SDPA and eager."""
    kernels = given.pop("kernels", ("sdpa", "eager"))
    feed = given.pop("feed", lambda: {"input_ids": ids()})

    def make(kernel: str) -> tuple[nn.Module, Any]:
        transformers = pytest.importorskip("transformers")
        cls = getattr(transformers, model, None)
        if cls is None:
            pytest.skip(f"this transformers has no {model}")
        settings = cls.config_class(**config)
        return cls._from_config(settings, attn_implementation=kernel), feed()

    for kernel in kernels:
        add(f"{name}-{kernel}", functools.partial(make, kernel), layers, **given)


def _images(**more: Any) -> Callable[[], Any]:
    return lambda: {"pixel_values": pixels(), **more}


_SIZES = dict(hidden_size=40, num_hidden_layers=2, num_attention_heads=5, intermediate_size=56)
_SEES = dict(**_SIZES, image_size=IMAGE, patch_size=PATCH)
_TEXT = dict(**_SIZES, vocab_size=VOCABULARY, max_position_embeddings=64, pad_token_id=0)
_DECODER = {**_TEXT, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3,
            "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
_GROUPED = dict(causal=True, grouped=2)
_CROSS = (False, False, True, False, True, False)

_SQUARE_SEES = {**_SEES, "image_size": 24}


def _squares() -> Any:
    return {"pixel_values": pixels((24, 24))}


_hf("vit", "ViTModel", _SEES, feed=_images(), prefix=_CLS)
_hf("deit", "DeiTModel", _SEES, feed=_images(), prefix=("cls", "cls"))
_hf("dinov2", "Dinov2Model", {**_SQUARE_SEES, "layerscale_value": 0.4}, feed=_squares, prefix=_CLS)
_hf("dinov2-registers", "Dinov2WithRegistersModel", {**_SQUARE_SEES, "num_register_tokens": 3},
    feed=_squares, prefix=("cls", *[_REG] * 3))  # fmt: skip
_hf("dinov3", "DINOv3ViTModel", {**_SEES, "num_register_tokens": 2, "layerscale_value": 0.3},
    feed=_images(), prefix=("cls", _REG, _REG))  # fmt: skip
_CLIP_SEES = {**_SIZES, "image_size": 24, "patch_size": 8}
_hf("clip-vision", "CLIPVisionModel", _CLIP_SEES, prefix=_CLS,
    feed=_squares)  # fmt: skip
_hf("clip", "CLIPModel", {"text_config": _TEXT, "vision_config": _CLIP_SEES}, (2, 3, 0, 1),
    causal=(False, False, True, True),
    feed=lambda: {"pixel_values": pixels((24, 24)), "input_ids": ids()})  # fmt: skip
_hf("siglip-vision", "SiglipVisionModel", _CLIP_SEES, (0, 1, 2), prefix=(),
    residual=(True, True, False),
    feed=_squares)  # fmt: skip
_hf("siglip-text", "SiglipTextModel", _TEXT)
_hf("beit", "BeitModel", {**_SEES, "use_relative_position_bias": True}, feed=_images(), prefix=_CLS)
_hf("swin", "SwinModel", dict(image_size=32, patch_size=2, embed_dim=12, depths=[2, 2],
    num_heads=[2, 3], window_size=4), (0, 1, 2, 3), residual=False,
    feed=lambda: {"pixel_values": pixels((32, 32))})  # fmt: skip
_hf("bert", "BertModel", _TEXT, feed=padded)
_hf("roberta", "RobertaModel", _TEXT, feed=padded)
_hf("distilbert", "DistilBertModel", dict(vocab_size=VOCABULARY, dim=40, n_layers=2, n_heads=5,
    hidden_dim=53, max_position_embeddings=64), feed=padded)  # fmt: skip
_hf("albert", "AlbertModel", {**_TEXT, "embedding_size": 12, "num_hidden_layers": 3}, (0, 1, 2),
    feed=padded)  # fmt: skip
_hf("deberta-v2", "DebertaV2Model", {**_TEXT, "relative_attention": True, "position_buckets": 7,
    "pos_att_type": ["p2c", "c2p"], "share_att_key": True, "max_relative_positions": 32},
    feed=padded, kernels=("eager",))  # fmt: skip
_hf("modernbert", "ModernBertModel", {**_TEXT, "global_attn_every_n_layers": 2,
    "local_attention": 6}, feed=padded)  # fmt: skip
_hf("electra", "ElectraModel", {**_TEXT, "embedding_size": 16}, feed=padded)
_hf("t5", "T5ForConditionalGeneration", dict(vocab_size=VOCABULARY, d_model=40, d_kv=7, d_ff=53,
    num_layers=2, num_heads=5, pad_token_id=0, decoder_start_token_id=0), (0, 1, 2, 2, 3, 3),
    causal=_CROSS,
    feed=lambda: {**padded(), "decoder_input_ids": ids(7)})  # fmt: skip
_hf("bart", "BartModel", dict(vocab_size=VOCABULARY, d_model=40, encoder_layers=2,
    decoder_layers=2, encoder_attention_heads=5, decoder_attention_heads=5, encoder_ffn_dim=53,
    decoder_ffn_dim=53, max_position_embeddings=64), (0, 1, 2, 2, 3, 3), causal=_CROSS,
    feed=lambda: {**padded(), "decoder_input_ids": ids(7)})  # fmt: skip
_hf("whisper", "WhisperModel", dict(vocab_size=VOCABULARY, d_model=40, encoder_layers=2,
    decoder_layers=2, encoder_attention_heads=5, decoder_attention_heads=5, encoder_ffn_dim=53,
    decoder_ffn_dim=53, max_source_positions=11, max_target_positions=17, num_mel_bins=8,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1),
    (0, 1, 2, 2, 3, 3), causal=_CROSS,
    feed=lambda: {"input_features": torch.randn(BATCH, 8, 22),
                  "decoder_input_ids": ids(7)})  # fmt: skip
_hf("gpt2", "GPT2LMHeadModel", dict(vocab_size=VOCABULARY, n_embd=40, n_layer=2, n_head=5,
    n_positions=64), causal=True, feed=padded)  # fmt: skip
_hf("gpt-neo", "GPTNeoModel", dict(vocab_size=VOCABULARY, hidden_size=40, num_layers=2,
    num_heads=5, attention_types=[[["global", "local"], 1]], window_size=4,
    max_position_embeddings=64), causal=True, kernels=("eager",))  # fmt: skip
_hf("gpt-neox", "GPTNeoXModel", {**_TEXT, "hidden_size": 40}, causal=True)
_hf("gpt-j", "GPTJModel", dict(vocab_size=VOCABULARY, n_embd=40, n_layer=2, n_head=5,
    n_positions=64, rotary_dim=4), causal=True, kernels=("eager",))  # fmt: skip
_FALCON = dict(vocab_size=VOCABULARY, hidden_size=48, num_hidden_layers=2, num_attention_heads=6)
_hf("falcon", "FalconModel", {**_FALCON, "alibi": False}, causal=True, grouped=6)
_hf("falcon-alibi", "FalconModel", {**_FALCON, "alibi": True, "multi_query": False}, causal=True,
    feed=padded)  # fmt: skip
_hf("falcon-new", "FalconModel", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 3,
    "alibi": False}, **_GROUPED)  # fmt: skip
_hf("bloom", "BloomModel", dict(vocab_size=VOCABULARY, hidden_size=40, n_layer=2, n_head=5),
    causal=True, kernels=("eager",), feed=padded)  # fmt: skip
_hf("mpt", "MptModel", dict(vocab_size=VOCABULARY, d_model=40, n_layers=2, n_heads=5,
    max_seq_len=64), causal=True, kernels=("eager",))  # fmt: skip
_hf("opt", "OPTModel", dict(vocab_size=VOCABULARY, hidden_size=40, num_hidden_layers=2,
    num_attention_heads=5, ffn_dim=53, max_position_embeddings=64, word_embed_proj_dim=40),
    causal=True, feed=padded)  # fmt: skip
_hf("phi", "PhiModel", _TEXT, causal=True, feed=padded)
_hf("phi-3", "Phi3Model", _DECODER, **_GROUPED)
_hf("llama", "LlamaForCausalLM", _DECODER, feed=padded, **_GROUPED)
_hf("llama-left", "LlamaForCausalLM", _DECODER, feed=lambda: padded("left"), **_GROUPED)
_hf("mistral", "MistralModel", {**_DECODER, "sliding_window": 5}, **_GROUPED)
_hf("qwen2", "Qwen2Model", _DECODER, **_GROUPED)
_hf("qwen3", "Qwen3Model", _DECODER, linear="vo", **_GROUPED)
_hf("qwen3-sliding", "Qwen3Model", {**_DECODER, "use_sliding_window": True, "sliding_window": 5,
    "max_window_layers": 1}, linear="vo", **_GROUPED)  # fmt: skip
_hf("gemma-2", "Gemma2Model", {**_DECODER, "sliding_window": 5, "attn_logit_softcapping": 3.0,
    "query_pre_attn_scalar": 8}, kernels=("eager",), **_GROUPED)  # fmt: skip
_hf("gemma-3", "Gemma3TextModel", {**_DECODER, "sliding_window": 5}, linear="vo", **_GROUPED)
_MOE = dict(num_local_experts=3, num_experts=3, num_experts_per_tok=2)
_hf("gpt-oss", "GptOssModel", {**_DECODER, **_MOE, "sliding_window": 5}, kernels=("eager",),
    **_GROUPED)  # fmt: skip
_hf("mixtral", "MixtralModel", {**_DECODER, **_MOE}, **_GROUPED)
_hf("qwen3-next", "Qwen3NextModel", {**_DECODER, **_MOE, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 6, "linear_value_head_dim": 6, "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2}, (1, 3), linear="v",
    silent=2,
    **_GROUPED)  # fmt: skip
_hf("deepseek-v3", "DeepseekV3Model", {**_DECODER, "num_key_value_heads": 6, "q_lora_rank": 11,
    "kv_lora_rank": 13, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7,
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1, "head_dim": 4}, causal=True,
    linear="o")  # fmt: skip
_hf("olmo2", "Olmo2Model", _DECODER, linear="vo", **_GROUPED)
_hf("cohere", "CohereModel", _DECODER, **_GROUPED)
_hf("olmo3", "Olmo3Model", {**_DECODER, "num_hidden_layers": 4, "sliding_window": 5}, (0, 1, 2, 3),
    linear="vo", **_GROUPED)  # fmt: skip
_hf("granite", "GraniteModel", {**_DECODER, "attention_multiplier": 0.3}, **_GROUPED)
_hf("glm-4", "Glm4Model", _DECODER, **_GROUPED)
_hf("starcoder2", "Starcoder2Model", {**_DECODER, "sliding_window": 5}, **_GROUPED)
_hf("llama-4", "Llama4TextModel", {**_DECODER, **_MOE, "num_hidden_layers": 4,
    "attention_chunk_size": 5, "intermediate_size_mlp": 24}, (0, 1, 2, 3), linear="vo",
    extra=True, **_GROUPED)  # fmt: skip
_hf("jamba", "JambaModel", {**_DECODER, **_MOE, "num_hidden_layers": 4, "attn_layer_period": 2,
    "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 4,
    "mamba_dt_rank": 4, "use_mamba_kernels": False}, (1, 3), silent=2, **_GROUPED)  # fmt: skip
_hf("bamba", "BambaModel", {**_DECODER, "attn_layer_indices": [1], "mamba_n_heads": 8,
    "mamba_d_head": 12, "mamba_d_state": 4}, (1,), silent=1, **_GROUPED)  # fmt: skip
_hf("lfm2", "Lfm2Model", {**_DECODER, "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"]}, (1,), linear="vo", silent=2,
    **_GROUPED)  # fmt: skip
_hf("recurrent-gemma", "RecurrentGemmaModel", {**_DECODER, "num_hidden_layers": 3,
    "lru_width": 48, "attention_window_size": 5,
    "block_types": ["recurrent", "recurrent", "attention"]}, (2,), silent=2,
    **_GROUPED)  # fmt: skip
_hf("minimax", "MiniMaxModel", {**_DECODER, **_MOE, "block_size": 8,
    "layer_types": ["linear_attention", "full_attention"]}, (1,), silent=1,
    extra=True, **_GROUPED)  # fmt: skip
_hf("diffllama", "DiffLlamaModel", {**_DECODER, "num_key_value_heads": 2}, (0, 0, 1, 1),
    causal=True, grouped=3, linear="qk")  # fmt: skip
_hf("bitnet", "BitNetModel", _DECODER, linear="qkv", **_GROUPED)
