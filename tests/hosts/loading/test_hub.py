"""Models from a repository's own code, and of open_clip: local stand-ins, nothing is downloaded."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import sinkwise as sw
from sinkwise.errors import InputError
from sinkwise.hosts.loading.hub import load_hub
from sinkwise.hosts.loading.source import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    ImagePreprocessing,
    Source,
    source_of,
)
from tests.models.nn_models import HUB


def test_a_local_repository_s_entry_point(capsys: pytest.CaptureFixture) -> None:
    before = list(sys.path)
    model = sw.load(f"hub:{HUB}/dinov2_tiny", dtype="bfloat16")
    assert type(model).__module__ == "dinov2.models" and not model.training
    assert next(model.parameters()).dtype == torch.bfloat16
    image = ImagePreprocessing(24, IMAGENET_MEAN, IMAGENET_STD)
    assert source_of(model) == Source(f"hub:{HUB}/dinov2_tiny", image=image)
    assert sys.path == before and capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("name", "prefix"), [("dinov2_tiny", 5), ("dinov3_tiny", 3)])
def test_it_is_scanned_by_its_layout(name: str, prefix: int) -> None:
    torch.manual_seed(0)
    scan = sw.scan(sw.load(f"hub:{HUB}/{name}"), [torch.randn(2, 3, 24, 24)], rules="mean")
    assert scan.meta["sites_measured"] == [] and scan.meta["sites_unknown"] == []
    assert len(scan.layers) == 2 and scan.layers["largest_dim"].is_not_null().all()
    share = {kind: scan.layers[f"received_{kind}"][0] for kind in ("cls", "register", "patch")}
    assert sum(share.values()) == pytest.approx(1.0)
    # At random weights attention is nearly uniform: a kind's share is its number of tokens.
    assert share["register"] == pytest.approx((prefix - 1) / (prefix + 9), rel=0.2)


def test_weights_that_were_never_loaded_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """DINOv3's key biases are masked by NaN until its checkpoint is read."""
    original = torch.hub.load

    def bare(*given, **named):
        return original(*given, **named, pretrained=False)

    monkeypatch.setattr(torch.hub, "load", bare)
    with pytest.raises(InputError, match=r"has NaN in 'blocks\.0\.attn\.qkv\.bias_mask'"):
        sw.load(f"hub:{HUB}/dinov3_tiny")


@pytest.mark.parametrize("name", ["dinov2_tiny", "a/b/c/d", "nowhere/else/no-name", f"{HUB}/", ""])
def test_another_spelling_is_an_error(name: str) -> None:
    with pytest.raises(InputError, match="is not hub:REPO/NAME"):
        load_hub(name)


def test_what_does_not_give_a_module_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no hubconf\.py"):
        sw.load(f"hub:{tmp_path}/model")
    for entry, message in (
        ("no_module", "is a dict, not a torch module"),
        ("broken", r"weights are nowhere \(an entry point"),
        ("nothing", "Cannot find callable nothing"),
    ):
        with pytest.raises(InputError, match=message):
            sw.load(f"hub:{HUB}/{entry}")


def test_a_repository_of_github_is_asked_for_without_a_prompt(monkeypatch) -> None:
    asked = {}

    def load(place, entry, **given):
        asked.update(given, place=place, entry=entry)
        return torch.nn.Linear(2, 2)

    monkeypatch.setattr(torch.hub, "load", load)
    assert load_hub("facebookresearch/dinov2:main/dinov2_vits14_reg")[1].image is None
    assert asked["source"] == "github" and asked["trust_repo"] is True
    assert (asked["place"], asked["entry"]) == ("facebookresearch/dinov2:main", "dinov2_vits14_reg")


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """A small architecture of open_clip, and weights for it."""
    open_clip = pytest.importorskip("open_clip")
    sizes = {"layers": 2, "width": 40, "head_width": 8, "patch_size": 8, "image_size": 24}
    text = {"layers": 2, "width": 24, "heads": 3, "vocab_size": 97, "context_length": 13}
    facts = {"embed_dim": 17, "vision_cfg": sizes, "text_cfg": text}
    (tmp_path / "sinkwise-tiny.json").write_text(json.dumps(facts))
    open_clip.add_model_config(tmp_path)
    torch.manual_seed(0)
    model = open_clip.create_model("sinkwise-tiny")
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(weights, tmp_path / "weights.safetensors")
    return f"sinkwise-tiny/{tmp_path}/weights.safetensors"


def test_open_clip_by_architecture_and_weights(tiny: str) -> None:
    from safetensors.torch import load_file

    model = sw.load(f"open_clip:{tiny}")
    saved = load_file(tiny.partition("/")[2])
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    image = source_of(model).image
    assert image is not None and image.size == 24 and image.interpolation == "bicubic"
    scan = sw.scan(model, [torch.randn(2, 3, 24, 24)], rules="mean")
    assert len(scan.heads) == 10 and scan.meta["sites_unknown"] == []


def test_open_clip_s_errors(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ViT-B-32", "ViT-B-32/"):
        with pytest.raises(InputError, match="is not open_clip:ARCH/TAG"):
            sw.load(f"open_clip:{name}")
    for name in ("no-such-arch/openai", "sinkwise-tiny/no-such-tag"):
        with pytest.raises(InputError, match="cannot be loaded"):
            sw.load(f"open_clip:{name}")
    monkeypatch.setitem(sys.modules, "open_clip", None)
    with pytest.raises(InputError, match=r"pip install 'sinkwise\[open_clip\]'"):
        sw.load("open_clip:ViT-B-32/openai")
