"""Registers in models with rotary positions, against the same models' own registers."""

import pytest
import torch

from sinkwise.mitigations.applying import mitigate
from sinkwise.mitigations.registers import Registers

COUNT = 3
SIZES = {"img_size": 24, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
SIZES |= {"num_classes": 5, "use_abs_pos_emb": False, "use_rot_pos_emb": True}


def eva(count: int, **options):
    """timm's EVA with so many registers of its own."""
    timm = pytest.importorskip("timm.models.eva")
    torch.manual_seed(0)
    return timm.Eva(**SIZES, **options, num_reg_tokens=count).eval()


def dinov3(count: int):
    """transformers' DINOv3 with so many registers of its own."""
    import transformers

    torch.manual_seed(0)
    config = transformers.DINOv3ViTConfig(
        image_size=24, patch_size=8, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=4, num_register_tokens=count,
    )  # fmt: skip
    return transformers.DINOv3ViTModel(config).eval()


def perturbed(model):
    """The model with larger weights: its tokens matter."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rope_type": "dinov3"},
        {"rope_type": "mixed"},
        {"qkv_fused": False, "swiglu_mlp": True, "scale_mlp": True},
        {"attn_type": "rope", "qkv_fused": False, "num_kv_heads": 2},
        {"use_post_norm": True},
    ],
    ids=str,
)
def test_as_timms_own_registers(options):
    own, plain = perturbed(eva(COUNT, **options)), eva(0, **options)
    weights = own.state_dict()
    tokens = weights.pop("reg_token")[0]
    plain.load_state_dict(weights)
    picture = torch.randn(2, 3, 24, 24)
    with torch.no_grad():
        wanted = own.forward_features(picture)
        without = plain.forward_features(picture)
        with mitigate(plain, Registers(COUNT)):
            plain.registers.tokens.copy_(tokens)
            got = plain.forward_features(picture)
        again = plain.forward_features(picture)
    wanted = torch.cat([wanted[:, :1], wanted[:, 1 + COUNT :]], dim=1)
    assert got.shape == without.shape
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(got, without, atol=1e-2)
    assert torch.equal(again, without)


def test_as_transformers_own_registers():
    own, plain = perturbed(dinov3(COUNT)), dinov3(0)
    weights = own.state_dict()
    tokens = weights.pop("embeddings.register_tokens")[0]
    plain.load_state_dict(weights, strict=False)
    picture = torch.randn(2, 3, 24, 24)
    with torch.no_grad():
        wanted = own(picture).last_hidden_state
        without = plain(picture).last_hidden_state
        mitigate(plain, Registers(COUNT))
        plain.registers.tokens.copy_(tokens)
        got = plain(picture).last_hidden_state
    wanted = torch.cat([wanted[:, :1], wanted[:, 1 + COUNT :]], dim=1)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(got, without, atol=1e-2)
