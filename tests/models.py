"""Small models of every family at random weights, built from their configurations: no download.

`CASES` lists them; `case.build()` seeds, builds and returns (model in eval mode, inputs), the
inputs being a tuple of positional arguments or a dict of keyword arguments.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

BATCH, TOKENS, VOCABULARY = 2, 13, 97
IMAGE, PATCH = (24, 40), 8
GRID = (IMAGE[0] // PATCH, IMAGE[1] // PATCH)


@dataclass(frozen=True, eq=False)
class Case:
    """One model: how it is built and what capture must find in it."""

    name: str
    make: Callable[[], tuple[nn.Module, Any]]
    layers: tuple[int, ...]
    """The layer of each record of one forward pass, in order; its length is their number."""
    causal: tuple[bool, ...] | bool = False
    """Whether each record's map is zero above the diagonal."""
    linear: str = "qkvo"
    """Which projections are linear in the attention module's input, so that sites can be tested."""
    faithful: bool = True
    """False where q, k, scale and mask cannot tell the whole score."""
    residual: bool = True
    """Whether the block's input has the records' batch and queries."""
    prefix: tuple[str, ...] | None = None
    """Kinds before the patches, for pictures in a sequence."""
    suffix: int = 0
    exact: bool = True
    """False where torch's fast path, avoided while capturing, rounds differently."""
    grouped: int = 1
    """Query heads per key/value head."""

    def build(self) -> tuple[nn.Module, Any]:
        """(model, inputs), the same at each call."""
        torch.manual_seed(11)
        model, inputs = self.make()
        with torch.no_grad():
            for parameter in model.parameters():  # zero-initialised parts would hide mistakes
                if parameter.dim() < 2 or float(parameter.abs().max()) < 1e-2:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        return model.eval(), inputs


CASES: list[Case] = []


def _add(name: str, make: Callable, layers: tuple[int, ...], **facts: Any) -> None:
    CASES.append(Case(name, make, layers, **facts))


def run(model: nn.Module, inputs: Any) -> Any:
    """The model's answer to a tuple or a dict of inputs."""
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def tensors(out: Any) -> list[Tensor]:
    """All tensors of an answer, in order."""
    if isinstance(out, Tensor):
        return [out]
    if isinstance(out, dict):
        out = list(out.values())
    if isinstance(out, tuple | list):
        return [tensor for part in out for tensor in tensors(part)]
    return []


def pixels(size: tuple[int, int] = IMAGE) -> Tensor:
    """A batch of pictures."""
    return torch.randn(BATCH, 3, *size)


def ids(length: int = TOKENS, vocabulary: int = VOCABULARY) -> Tensor:
    """A batch of token ids, none of them special."""
    return torch.randint(5, vocabulary, (BATCH, length))


def padded(side: str = "right", length: int = TOKENS) -> dict[str, Tensor]:
    """Token ids whose second sample has three tokens of padding."""
    tokens, mask = ids(length), torch.ones(BATCH, length, dtype=torch.int64)
    pad = slice(length - 3, length) if side == "right" else slice(0, 3)
    tokens[1, pad], mask[1, pad] = 0, 0
    return {"input_ids": tokens, "attention_mask": mask}


# timm


def _timm(name: str, path: str, layers: tuple[int, ...] = (0, 1), **given: Any) -> None:
    """Both ways of timm's attention, or those that `fused` names, of `timm.models.{path}`."""
    facts = {key: given.pop(key) for key in Case.__dataclass_fields__ if key in given}
    fused, size = given.pop("fused", (True, False)), given.pop("size", IMAGE)

    def make(fuse: bool) -> tuple[nn.Module, Any]:
        pytest.importorskip("timm")
        module, _, cls = path.rpartition(".")
        model = getattr(importlib.import_module(f"timm.models.{module}"), cls)(**given)
        for part in model.modules():
            if hasattr(part, "fused_attn"):
                part.fused_attn = fuse
        return model, (pixels(size),)

    for fuse in fused:
        kernel = "sdpa" if fuse else "eager"
        _add(f"timm-{name}-{kernel}", functools.partial(make, fuse), layers, **facts)


_CLS, _REG = ("cls",), "register"
_VIT = dict(
    img_size=IMAGE, patch_size=PATCH, embed_dim=40, depth=2, num_heads=5, num_classes=7
)
_SQUARE = {**_VIT, "img_size": 32, "size": (32, 32)}
_SWIN = dict(
    img_size=32, patch_size=2, embed_dim=12, depths=(2, 2), num_heads=(2, 3), num_classes=7,
    window_size=4, size=(32, 32), residual=False,
)  # fmt: skip
_plain, _eva = "vision_transformer.VisionTransformer", "eva.Eva"
_timm("vit", _plain, **_VIT, prefix=_CLS)
_timm("vit-registers", _plain, **_VIT, reg_tokens=3, init_values=0.5, prefix=("cls", *[_REG] * 3))
_timm(
    "vit-gap-registers", _plain, **_VIT, reg_tokens=2, class_token=False, global_pool="avg",
    prefix=(_REG, _REG),
)  # fmt: skip
_timm("vit-qk-norm", _plain, **_VIT, qk_norm=True, linear="vo", prefix=_CLS)
_timm("vit-pool", _plain, (0, 1, 2), **_VIT, class_token=False, global_pool="map", prefix=())
_timm("deit-3", "deit.VisionTransformer", **_VIT, init_values=0.1, no_embed_class=True, prefix=_CLS)
_timm("deit-distilled", "deit.VisionTransformerDistilled", **_VIT, prefix=("cls", "cls"))
_timm("eva-02", _eva, **_VIT, qkv_fused=False, swiglu_mlp=True, scale_mlp=True,
      use_rot_pos_emb=True, prefix=_CLS)  # fmt: skip
_timm("eva-fused", _eva, **_VIT, use_rot_pos_emb=True, init_values=0.3, num_reg_tokens=2,
      prefix=("cls", _REG, _REG))  # fmt: skip
_timm("eva-grouped", _eva, **{**_VIT, "embed_dim": 48, "num_heads": 6}, num_kv_heads=3,
      attn_type="rope", use_rot_pos_emb=True, grouped=2, prefix=_CLS)  # fmt: skip
_timm("dinov3", _eva, **_VIT, rope_type="dinov3", use_rot_pos_emb=True, use_abs_pos_emb=False,
      init_values=0.3, num_reg_tokens=4, prefix=("cls", *[_REG] * 4))  # fmt: skip
_timm("beit", "beit.Beit", **_VIT, init_values=0.2, use_rel_pos_bias=True, prefix=_CLS)
_timm("swin", "swin_transformer.SwinTransformer", (0, 1, 2, 3), **_SWIN)
_timm("swin-2", "swin_transformer_v2.SwinTransformerV2", (0, 1, 2, 3), **_SWIN, linear="vo",
      fused=(False,))  # fmt: skip
_timm("cait", "cait.Cait", (0, 1, 2, 3), **_SQUARE, depth_token_only=2, faithful=False, prefix=())
_timm("xcit", "xcit.Xcit", (0, 1, 2, 3), **_SQUARE, cls_attn_layers=2, linear="", residual=False,
      prefix=())  # fmt: skip


def _naflex(fuse: bool) -> tuple[nn.Module, Any]:
    naflex = pytest.importorskip("timm.models.naflexvit")
    config = naflex.NaFlexVitCfg(
        patch_size=PATCH, embed_dim=40, depth=2, num_heads=5, class_token=True, reg_tokens=2,
        pos_embed_grid_size=GRID,
    )  # fmt: skip
    model = naflex.NaFlexVit(config, num_classes=7)
    for block in model.blocks:
        block.attn.fused_attn = fuse
    return model, (pixels(),)


def _create(name: str, size: int, **given: Any) -> Callable[[], tuple[nn.Module, Any]]:
    def make() -> tuple[nn.Module, Any]:
        timm = pytest.importorskip("timm")
        return timm.create_model(name, pretrained=False, num_classes=7, **given), (
            pixels((size, size)),
        )

    return make


_add("timm-naflex-sdpa", lambda: _naflex(True), (0, 1), prefix=("cls", _REG, _REG))
_add("timm-naflex-eager", lambda: _naflex(False), (0, 1), prefix=("cls", _REG, _REG))
_add("timm-maxvit", _create("test_maxvit", 64, img_size=64), (0, 1, 2, 3), residual=False)

# transformers


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
        _add(f"{name}-{kernel}", functools.partial(make, kernel), layers, **given)


def _images(**more: Any) -> Callable[[], Any]:
    return lambda: {"pixel_values": pixels(), **more}


_SIZES = dict(hidden_size=40, num_hidden_layers=2, num_attention_heads=5, intermediate_size=53)
_SEES = dict(**_SIZES, image_size=IMAGE, patch_size=PATCH)
_TEXT = dict(**_SIZES, vocab_size=VOCABULARY, max_position_embeddings=64, pad_token_id=0)
_DECODER = {**_TEXT, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3,
            "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
_GROUPED = dict(causal=True, grouped=2)
_CROSS = (False, False, True, False, True, False)

_hf("vit", "ViTModel", _SEES, feed=_images(), prefix=_CLS)
_hf("deit", "DeiTModel", _SEES, feed=_images(), prefix=("cls", "cls"))
_hf("dinov2", "Dinov2Model", {**_SEES, "layerscale_value": 0.4}, feed=_images(), prefix=_CLS)
_hf("dinov2-registers", "Dinov2WithRegistersModel", {**_SEES, "num_register_tokens": 3},
    feed=_images(), prefix=("cls", *[_REG] * 3))  # fmt: skip
_hf("dinov3", "DINOv3ViTModel", {**_SEES, "num_register_tokens": 2, "layerscale_value": 0.3},
    feed=_images(), prefix=("cls", _REG, _REG))  # fmt: skip
_CLIP_SEES = {**_SIZES, "image_size": 24, "patch_size": 8}
_hf("clip-vision", "CLIPVisionModel", _CLIP_SEES, prefix=_CLS,
    feed=lambda: {"pixel_values": pixels((24, 24))})  # fmt: skip
_hf("clip", "CLIPModel", {"text_config": _TEXT, "vision_config": _CLIP_SEES}, (0, 1, 2, 3),
    causal=None,
    feed=lambda: {"pixel_values": pixels((24, 24)), "input_ids": ids()})  # fmt: skip
_hf("siglip-vision", "SiglipVisionModel", _CLIP_SEES, (0, 1, 2), prefix=(),
    feed=lambda: {"pixel_values": pixels((24, 24))})  # fmt: skip
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
    feed=padded, kernels=("eager",), faithful=None)  # fmt: skip
_hf("modernbert", "ModernBertModel", {**_TEXT, "global_attn_every_n_layers": 2,
    "local_attention": 6}, feed=padded)  # fmt: skip
_hf("electra", "ElectraModel", {**_TEXT, "embedding_size": 16}, feed=padded)
_hf("t5", "T5ForConditionalGeneration", dict(vocab_size=VOCABULARY, d_model=40, d_kv=7, d_ff=53,
    num_layers=2, num_heads=5, pad_token_id=0, decoder_start_token_id=0), (0, 1, 2, 2, 3, 3),
    causal=_CROSS, residual=False,
    feed=lambda: {**padded(), "decoder_input_ids": ids(7)})  # fmt: skip
_hf("bart", "BartModel", dict(vocab_size=VOCABULARY, d_model=40, encoder_layers=2,
    decoder_layers=2, encoder_attention_heads=5, decoder_attention_heads=5, encoder_ffn_dim=53,
    decoder_ffn_dim=53, max_position_embeddings=64), (0, 1, 2, 2, 3, 3), causal=_CROSS,
    residual=False, feed=lambda: {**padded(), "decoder_input_ids": ids(7)})  # fmt: skip
_hf("whisper", "WhisperModel", dict(vocab_size=VOCABULARY, d_model=40, encoder_layers=2,
    decoder_layers=2, encoder_attention_heads=5, decoder_attention_heads=5, encoder_ffn_dim=53,
    decoder_ffn_dim=53, max_source_positions=11, max_target_positions=17, num_mel_bins=8,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1),
    (0, 1, 2, 2, 3, 3), causal=_CROSS, residual=False,
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
_hf("qwen3-next", "Qwen3NextModel", {**_DECODER, **_MOE, "moe_intermediate_size": 23,
    "shared_expert_intermediate_size": 23, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 6, "linear_value_head_dim": 6, "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2}, (1, 3), linear="v",
    **_GROUPED)  # fmt: skip
_hf("deepseek-v3", "DeepseekV3Model", {**_DECODER, "num_key_value_heads": 6, "q_lora_rank": 11,
    "kv_lora_rank": 13, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7,
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 23, "first_k_dense_replace": 1, "head_dim": 4}, causal=True,
    linear="o")  # fmt: skip
_hf("olmo2", "Olmo2Model", _DECODER, linear="vo", **_GROUPED)
_hf("cohere", "CohereModel", _DECODER, **_GROUPED)

# open_clip


def _open_clip(**custom: Any) -> tuple[nn.Module, Any]:
    open_clip = pytest.importorskip("open_clip")
    model = open_clip.CLIP(
        17,
        dict(layers=2, width=40, head_width=8, patch_size=PATCH, image_size=24, **custom),
        dict(layers=2, width=24, heads=3, vocab_size=VOCABULARY, context_length=TOKENS, **custom),
    )
    return model, (pixels((24, 24)), ids())


_BOTH = dict(causal=None, residual=False, exact=False)
_add("open_clip", _open_clip, (0, 1, 2, 3), **_BOTH)
_add("open_clip-layer-scale", lambda: _open_clip(ls_init_value=0.3), (0, 1, 2, 3), **_BOTH)
_add("open_clip-custom", lambda: _open_clip(block_type="custom"), (0, 1, 2, 3), causal=None)
_add("open_clip-cosine", lambda: _open_clip(scaled_cosine_attn=True, scale_heads=True),
     (0, 1, 2, 3), causal=None, linear="", faithful=None)  # fmt: skip

# torch.nn

_X = (BATCH, TOKENS, 40)
_BOOL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
_PAD = torch.arange(TOKENS)[None] >= torch.tensor([[TOKENS], [TOKENS - 3]])


def _multihead(shape=_X, key=None, value=None, dims=None, **call: Any) -> Callable:
    """`nn.MultiheadAttention` inside a list of one, called with flags of its constructor or call."""
    flags = ("batch_first", "add_bias_kv", "add_zero_attn", "kdim", "vdim")
    built = {flag: call.pop(flag) for flag in flags if flag in call}

    def make() -> tuple[nn.Module, Any]:
        query = torch.randn(shape)
        keys = query if key is None else torch.randn(key)
        values = keys if value is None else torch.randn(value)
        module = nn.MultiheadAttention(40, 5, **built)
        return module, {"query": query, "key": keys, "value": values, **call}

    return make


_MHA = {
    "plain": _multihead(batch_first=True, need_weights=False),
    "weights": _multihead(batch_first=True),
    "per-head": _multihead(batch_first=True, average_attn_weights=False),
    "sequence-first": _multihead((TOKENS, BATCH, 40), need_weights=False),
    "bias-kv": _multihead(batch_first=True, add_bias_kv=True),
    "zero": _multihead(batch_first=True, add_zero_attn=True, need_weights=False),
    "kdim": _multihead(key=(BATCH, 7, 11), value=(BATCH, 7, 17), kdim=11, vdim=17,
                       batch_first=True),
    "padding": _multihead(batch_first=True, key_padding_mask=_PAD),
    "padding-fused": _multihead(batch_first=True, key_padding_mask=_PAD, need_weights=False),
    "bool-mask": _multihead(batch_first=True, attn_mask=_BOOL),
    "float-mask": _multihead(batch_first=True, need_weights=False,
                             attn_mask=torch.zeros(_BOOL.shape).masked_fill(_BOOL, -torch.inf)),
    "causal": _multihead(batch_first=True, attn_mask=_BOOL, is_causal=True, need_weights=False),
    "unbatched": _multihead((TOKENS, 40), need_weights=False),
    "unbatched-weights": _multihead((TOKENS, 40)),
}  # fmt: skip
for _name, _make in _MHA.items():
    _add(f"nn-mha-{_name}", _make, (0,), causal="mask" in _name or _name == "causal",
         residual=False, exact=False)  # fmt: skip


def _layer(cls: type[nn.Module], **given: Any) -> nn.Module:
    return cls(40, 5, 53, **{"batch_first": True, **given})


def _encoder(nested: bool, **given: Any) -> Callable:
    def make() -> tuple[nn.Module, Any]:
        model = nn.TransformerEncoder(
            _layer(nn.TransformerEncoderLayer, **given), 2, enable_nested_tensor=nested
        )
        return model, {"src": torch.randn(_X), **({"src_key_padding_mask": _PAD} if nested else {})}

    return make


def _torch_decoder() -> tuple[nn.Module, Any]:
    model = nn.TransformerDecoder(_layer(nn.TransformerDecoderLayer), 2)
    target = torch.randn(BATCH, 7, 40)
    mask = nn.Transformer.generate_square_subsequent_mask(7)
    return model, {"tgt": target, "memory": torch.randn(_X), "tgt_mask": mask}


def _torch_transformer() -> tuple[nn.Module, Any]:
    model = nn.Transformer(40, 5, 2, 2, 53, batch_first=True)
    return model, (torch.randn(_X), torch.randn(BATCH, 7, 40))


_add("nn-encoder", _encoder(False), (0, 1), exact=False)
_add("nn-encoder-pre-norm", _encoder(False, norm_first=True), (0, 1), exact=False)
_add("nn-encoder-nested", _encoder(True), (0, 1), exact=None)
_add("nn-decoder", _torch_decoder, (0, 0, 1, 1), causal=(True, False) * 2, exact=False)
_add("nn-transformer", _torch_transformer, (0, 1, 2, 2, 3, 3), exact=False, residual=False)

# no softmax attention at all

NO_ATTENTION: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "resnet": _create("test_resnet", 32),
    "convnext": _create("test_convnext", 32),
    "efficientnet": _create("test_efficientnet", 32),
    "mixer": _create("mixer_s32_224", 64, img_size=64),
    "resmlp": _create("resmlp_12_224", 32, img_size=32),
    "gmlp": _create("gmlp_ti16_224", 32, img_size=32),
    "mambaout": _create("test_mambaout", 64),
    "poolformer": _create("poolformer_s12", 64),
}
