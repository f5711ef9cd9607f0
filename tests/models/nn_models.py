"""torch.nn's own attention with all its flags, open_clip, which builds on it, and hub code."""
# ruff: noqa: C408

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from .case import BATCH, PATCH, TOKENS, VOCABULARY, add, ids, pixels


def _open_clip(**custom: Any) -> tuple[nn.Module, Any]:
    open_clip = pytest.importorskip("open_clip")
    model = open_clip.CLIP(
        17,
        dict(layers=2, width=40, head_width=8, patch_size=PATCH, image_size=24, **custom),
        dict(layers=2, width=24, heads=3, vocab_size=VOCABULARY, context_length=TOKENS, **custom),
    )
    return model, (pixels((24, 24)), ids())


_BOTH = dict(causal=(False, False, True, True), fast_path=True)
add("open_clip", _open_clip, (0, 1, 2, 3), **_BOTH)
add("open_clip-layer-scale", lambda: _open_clip(ls_init_value=0.3), (0, 1, 2, 3), **_BOTH)
add("open_clip-custom", lambda: _open_clip(block_type="custom"), (0, 1, 2, 3),
     causal=(False, False, True, True))  # fmt: skip
add("open_clip-qk-norm", lambda: _open_clip(qk_norm=True, scale_heads=True), (0, 1, 2, 3),
    causal=(False, False, True, True), linear="v")  # fmt: skip


_X = (BATCH, TOKENS, 40)
_BOOL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
_PAD = torch.arange(TOKENS)[None] >= torch.tensor([[TOKENS], [TOKENS - 3]])


def _multihead(shape=_X, key=None, value=None, **call: Any) -> Callable:
    """`nn.MultiheadAttention` inside a list of one, called with its flags."""
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
    add(f"nn-mha-{_name}", _make, (0,), causal="mask" in _name or _name == "causal",
         residual=False, fast_path=True)  # fmt: skip


def _layer(cls: type[nn.Module], **given: Any) -> nn.Module:
    return cls(40, 4, 53, **{"batch_first": True, **given})


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
    model = nn.Transformer(40, 4, 2, 2, 53, batch_first=True)
    return model, (torch.randn(_X), torch.randn(BATCH, 7, 40))


add("nn-encoder", _encoder(False), (0, 1), fast_path=True)
add("nn-encoder-pre-norm", _encoder(False, norm_first=True), (0, 1), fast_path=True)
add("nn-encoder-nested", _encoder(True), (0, 1), fast_path=True)
add("nn-decoder", _torch_decoder, (0, 0, 1, 1), causal=(True, False) * 2, fast_path=True)
add("nn-transformer", _torch_transformer, (0, 1, 2, 2, 3, 3), fast_path=True)


HUB = Path(__file__).parent / "hub"
"""A hub repository: local stand-ins for DINOv2's and DINOv3's own code."""


def _hub(name: str, **given: Any) -> Callable[[], tuple[nn.Module, Any]]:
    return lambda: (torch.hub.load(str(HUB), name, source="local", **given), (pixels(),))


_DINO_2, _DINO_3 = ("cls", *["register"] * 4), ("cls", "register", "register")
add("dinov2-hub-sdpa", _hub("dinov2_tiny"), (0, 1), prefix=_DINO_2)
add("dinov2-hub-eager", _hub("dinov2_tiny", fused=False), (0, 1), prefix=_DINO_2)
add("dinov2-hub-chunks", _hub("dinov2_tiny", chunks=2, registers=0), (0, 1, 2, 3), prefix=("cls",))
add("dinov3-hub", _hub("dinov3_tiny"), (0, 1), prefix=_DINO_3)


def _state_space(cls: str, **sizes: Any) -> Callable:
    def make() -> tuple[nn.Module, Any]:
        transformers = pytest.importorskip("transformers")
        config = getattr(transformers, f"{cls}Config")
        given = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, **sizes}
        inputs = {"input_ids": ids(), "use_cache": False}
        return getattr(transformers, f"{cls}Model")(config(**given)), inputs

    return make


STATE_SPACE: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "mamba": _state_space("Mamba"),
    "mamba-2": _state_space("Mamba2", num_heads=4, head_dim=16, state_size=8, n_groups=2),
    "rwkv": _state_space("Rwkv", attention_hidden_size=32, context_length=32),
}
"""Models whose layers mix tokens without any softmax."""
