"""transformers' families whose attention has a sink logit, all that the installed version has."""
# ruff: noqa: C408

from .case import padded
from .hf_models import _DECODER, _GROUPED, _MOE, _hf

_EXPERTS = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
_LATENT = dict(q_lora_rank=11, kv_lora_rank=13, qk_nope_head_dim=6, qk_rope_head_dim=4,
    v_head_dim=7, num_key_value_heads=6, head_dim=4, index_head_dim=8, index_n_heads=2,
    index_topk=64)  # fmt: skip
_ONE = dict(kernels=("eager",), feed=padded)
"""None of them has SDPA, which knows no sink logit."""

_hf("granite-swa", "GraniteSWAModel", {**_DECODER, "sliding_window": 5,
    "attention_multiplier": 0.3}, **_ONE, **_GROUPED)  # fmt: skip
_hf("granitemoe-swa", "GraniteMoeSWAModel", {**_DECODER, **_MOE, "sliding_window": 5,
    "attention_multiplier": 0.3}, **_ONE, **_GROUPED)  # fmt: skip
_hf("flint", "FlintModel", {**_DECODER, **_EXPERTS, "sliding_window": 5}, linear="vo", **_ONE,
    **_GROUPED)  # fmt: skip
_hf("openai-privacy-filter", "OpenAIPrivacyFilterModel", {**_DECODER, **_MOE,
    "sliding_window": 3}, grouped=2, **_ONE)  # fmt: skip
_hf("mimo-v2-flash", "MiMoV2FlashModel", {**_DECODER, **_EXPERTS, "v_head_dim": 5,
    "num_key_value_heads": 1, "sliding_window": 5, "mlp_layer_types": ["dense", "sparse"],
    "layer_types": ["full_attention", "sliding_attention"]}, causal=True, extra=True,
    **_ONE)  # fmt: skip
_hf("deepseek-v4", "DeepseekV4Model", {**_DECODER, **_EXPERTS, "num_key_value_heads": 1,
    "q_lora_rank": 11, "o_groups": 2, "o_lora_rank": 5, "qk_rope_head_dim": 4,
    "sliding_window": 5, "hc_mult": 2, "index_head_dim": 8, "index_n_heads": 2, "index_topk": 4,
    "layer_types": ["sliding_attention"] * 2}, extra=True, causal=True, grouped=6,
    **_ONE)  # fmt: skip
_hf("hy-v4", "HYV4Model", {**_DECODER, **_EXPERTS, **_LATENT, "hc_mult": 2}, extra=True,
    causal=True, **_ONE)  # fmt: skip
_hf("hy-v4-vl", "HYV4VLTextModel", {**_DECODER, **_EXPERTS, **_LATENT, "hc_mult": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]}},
    extra=True, causal=True, **_ONE)  # fmt: skip
_INKLING = {**_DECODER, **_EXPERTS, "swa_num_attention_heads": 6, "swa_num_key_value_heads": 3,
    "swa_head_dim": 8, "sliding_window_size": 5, "rel_extent": 8, "d_rel": 4,
    "unpadded_vocab_size": 90, "num_experts_per_tok": 4}  # fmt: skip
# All experts, so that no token's routing changes the rounding of others.
# Each part also attends, in one query a token, over the residual stream's earlier states.
_hf("inkling-2", "Inkling2TextModel", _INKLING, (0, 0, 1, 1, 1, 2), extra=True,
    causal=(True, False, False) * 2, **_ONE)  # fmt: skip
_hf("inkling-2-loop", "Inkling2LoopTextModel", {**_INKLING, "num_hidden_layers": 3,
    "loop_layer_index_start": 1, "loop_layer_index_end": 2, "loop_num_passes": 2,
    "loop_gate_rank": 3, "n_layers_per_attn_res_block": 1},
    (0, 0, 1, 1, 1, 3, 1, 1, 1, 2, 2, 2, 4), extra=True,
    causal=(True, *[False] * 2, True, *[False] * 3, True, *[False] * 2, True, False, False),
    **_ONE)  # fmt: skip

FOLDERS = {
    "gpt-oss": "gpt_oss", "granite-swa": "granite_swa", "granitemoe-swa": "granitemoe_swa",
    "flint": "flint", "openai-privacy-filter": "openai_privacy_filter",
    "mimo-v2-flash": "mimo_v2_flash", "deepseek-v4": "deepseek_v4", "hy-v4": "hy_v4",
    "hy-v4-vl": "hy_v4_vl", "inkling-2": "inkling2", "inkling-2-loop": "inkling2_loop",
}  # fmt: skip
"""Each family's folder in transformers/models."""
