"""timm: vision transformers of every kind, and networks without attention."""
# ruff: noqa: C408

import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from .case import GRID, IMAGE, PATCH, Case, add, pixels


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
        add(f"timm-{name}-{kernel}", functools.partial(make, fuse), layers, **facts)


_CLS, _REG = ("cls",), "register"
_VIT = dict(img_size=IMAGE, patch_size=PATCH, embed_dim=40, depth=2, num_heads=5, num_classes=7)
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
_timm("vit-pool", _plain, (0, 1, 2), **_VIT, class_token=False, global_pool="map", prefix=(),
      residual=(True, True, False))  # fmt: skip
_timm("deit-3", "deit.VisionTransformer", **_VIT, init_values=0.1, no_embed_class=True, prefix=_CLS)
_timm("deit-distilled", "deit.VisionTransformerDistilled", **_VIT, prefix=("cls", "cls"))
_timm("eva-02", _eva, **_VIT, qkv_fused=False, swiglu_mlp=True, scale_mlp=True,
      use_rot_pos_emb=True, prefix=_CLS)  # fmt: skip
_timm("eva-fused", _eva, **_VIT, use_rot_pos_emb=True, init_values=0.3, num_reg_tokens=2,
      prefix=("cls", _REG, _REG))  # fmt: skip
_timm("eva-grouped", _eva, **{**_VIT, "embed_dim": 48, "num_heads": 6}, num_kv_heads=3,
      attn_type="rope", qkv_fused=False, use_rot_pos_emb=True, grouped=2, prefix=_CLS)  # fmt: skip
_timm("dinov3", _eva, **_VIT, rope_type="dinov3", use_rot_pos_emb=True, use_abs_pos_emb=False,
      init_values=0.3, num_reg_tokens=4, prefix=("cls", *[_REG] * 4))  # fmt: skip
_timm("beit", "beit.Beit", **_VIT, init_values=0.2, use_rel_pos_bias=True, prefix=_CLS)
_timm("swin", "swin_transformer.SwinTransformer", (0, 1, 2, 3), **_SWIN)
_timm("swin-2", "swin_transformer_v2.SwinTransformerV2", (0, 1, 2, 3), **_SWIN, linear="vo",
      fused=(False,))  # fmt: skip
_timm("cait", "cait.Cait", (0, 1, 2, 3), **_SQUARE, depth_token_only=2,
      faithful=(False, False, True, True),
      residual=(True, True, False, False), prefix=())  # fmt: skip
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


add(
    "timm-naflex-sdpa",
    lambda: _naflex(True),
    (0, 1, 2),
    residual=(True, True, False),
    prefix=("cls", _REG, _REG),
)
add(
    "timm-naflex-eager",
    lambda: _naflex(False),
    (0, 1, 2),
    residual=(True, True, False),
    prefix=("cls", _REG, _REG),
)
add(
    "timm-maxvit", _create("test_maxvit", 64, img_size=64), (0, 0, 1, 1, 2, 2, 3, 3), residual=False
)

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
