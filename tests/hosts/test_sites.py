"""Sites: the layouts' weights are those that the model computes with, head by head."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sinkwise.capturing.capture import capture
from sinkwise.capturing.jacobian import measured_sites
from sinkwise.core.records import AttentionRecord, AttentionSite
from sinkwise.hosts.sites import attention_sites
from tests.models import CASES, Case, build, run

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)

WITHOUT = ("attn_pool", "deepseek-v3", "timm-xcit")
"""What no layout names: pooling by a learned query, latent projections, attention over channels."""


def records(model: nn.Module, inputs: Any, **options: Any) -> list[AttentionRecord]:
    """All records of one forward pass."""
    kept: list[AttentionRecord] = []
    with torch.no_grad(), capture(model, kept.append, **options):
        run(model, inputs)
    return kept


def error(one: Tensor, other: Tensor, *, up_to_scale: bool = False) -> float:
    """Largest difference over the largest entry, after the best common factor if asked for."""
    factor = float((one * other).sum() / (one * one).sum()) if up_to_scale else 1.0
    return float((factor * one - other).abs().max() / other.abs().max())


@cases
def test_every_attention_has_a_site_but_these(case: Case) -> None:
    model, inputs = case.build()
    sites = attention_sites(model)
    for record in records(model, inputs, sites=sites):
        unknown = any(part in f"{case.name} {record.name}" for part in WITHOUT)
        over_channels = "xcit" in case.name and "cls_attn" not in record.name
        if "xcit" in case.name:
            unknown = over_channels
        assert (record.site is None) == unknown, record.name
        if record.site is not None:
            assert record.site.name == record.name and record.site.source == "layout"


@cases
def test_projections_are_the_measured_ones(case: Case) -> None:
    model, inputs = case.build()
    norms = ("q_norm", "k_norm", "ln_q", "ln_k", "q_layernorm", "k_layernorm", "query_norm")
    for module in model.modules():  # without these, query and key are linear in the input
        for name in norms:
            if isinstance(getattr(module, name, None), nn.Module):
                setattr(module, name, nn.Identity())
    sites = attention_sites(model)
    names = list(dict.fromkeys(record.name for record in records(model, inputs)))
    measured = measured_sites(model, names, inputs)
    compared = 0
    for name in names:
        site, truth = sites.get(name), measured.get(name)
        if site is None or truth is None:
            continue
        for part in "qkvo":
            ours, theirs = getattr(site, part), getattr(truth, part)
            if ours is None or theirs is None:
                continue
            if part in "qk" and "swin-2" in case.name:
                continue  # cosine attention
            assert ours.shape == theirs.shape
            # Some models fold the scale into the query, some rotate by more than unit length.
            assert error(ours, theirs, up_to_scale=part in "qk") <= 1e-5, (name, part)
            compared += 1
    expected = {"deepseek-v3", "nn-mha-sequence-first", "nn-mha-unbatched", "timm-maxvit"}
    if not any(case.name.startswith(name) for name in expected):
        assert compared >= 2


def _linear(module: nn.Module) -> bool:
    kinds = (nn.Linear, nn.MultiheadAttention)
    return isinstance(module, kinds) or type(module).__name__ == "Conv1D"


@cases
def test_heads_add_up_to_the_output(case: Case) -> None:
    """sum_h o_h (A v)_h + bias is what an output projection of the model really gave."""
    model, inputs = case.build()
    sites = attention_sites(model)
    outputs: list[tuple[str, Tensor]] = []

    def leave(name: str):
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            first = out[0] if isinstance(out, tuple) else out
            bias = getattr(getattr(module, "out_proj", module), "bias", None)
            outputs.append((name, first if bias is None else first - bias))

        return hook

    hooks = [
        module.register_forward_hook(leave(name))
        for name, module in model.named_modules()
        if _linear(module)
    ]
    calls = records(model, inputs, sites=sites)
    for hook in hooks:
        hook.remove()
    for record in calls:
        if record.site is None or record.site.o is None:
            continue
        if case.name.startswith("qwen3-next"):
            continue  # there is a gate in between
        update = torch.einsum("hov,bhtv->bto", record.site.o, record.out)
        where = record.name.removesuffix(".self").removesuffix(".attention")
        near = [out for name, out in outputs if name.startswith(where)]
        fits = [
            float((out.reshape(shape) - wanted).abs().max())
            for out in near
            for wanted in (update, update.transpose(0, 1))
            if out.numel() == wanted.numel()
            for shape in [wanted.shape]
        ]
        assert fits and min(fits) <= 2e-5 * max(1.0, float(update.abs().max())), record.name


def test_no_projection_is_named_where_the_heads_are_changed_before_it() -> None:
    """DiffLlama subtracts maps and norms, BitNet norms: W_O alone is not the heads' update."""
    for name in ("diffllama-eager", "bitnet-eager"):
        model, inputs = build(name)
        calls = records(model, inputs, sites=attention_sites(model))
        for record in calls:
            assert record.site is not None and record.site.o is None
            assert record.site.q is not None and record.site.input_gain is not None
        truth = measured_sites(model, [calls[0].name], inputs)[calls[0].name]
        assert truth.o is None
        assert (calls[0].site.v is None) == (name == "diffllama-eager")
    assert {"o_proj", "groupnorm"} <= dict(
        build("diffllama-eager")[0].layers[0].self_attn.named_modules()
    ).keys()


def _gain_of(module: nn.Module) -> Tensor | None:
    """The gain that a norm applies, by its class: Gemma's norms store gain - 1."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or "norm" not in type(module).__name__.lower():
        return None
    return (
        1 + weight
        if "Gemma" in type(module).__name__ or "Qwen3Next" in type(module).__name__
        else weight
    )


@cases
def test_input_gain_is_that_of_the_norm_before(case: Case) -> None:
    """The norm whose very output enters the attention module, or None where there is no such."""
    model, inputs = case.build()
    sites = attention_sites(model)
    normed: list[tuple[str, Tensor, Tensor]] = []
    found: dict[str, Tensor | None] = {}

    def leave(name: str, gain: Tensor):
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            normed.append((name.rpartition(".")[0], out, gain))

        return hook

    def enter(name: str):
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            x = next(t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))
            gains = [
                gain
                for block, out, gain in normed
                if (name + ".").startswith(block + ".") and re.search(r"\d", block)
                if out.numel() == x.numel() and torch.equal(out.flatten(), x.flatten())
            ]
            found.setdefault(name, gains[-1] if gains else None)

        return hook

    hooks = []
    for name, module in model.named_modules():
        gain = _gain_of(module)
        if gain is not None:
            hooks.append(module.register_forward_hook(leave(name, gain)))
        if name in sites:
            hooks.append(module.register_forward_pre_hook(enter(name), with_kwargs=True))
    with torch.no_grad():
        run(model, inputs)
    for hook in hooks:
        hook.remove()
    for name, gain in found.items():
        ours = sites[name].input_gain
        if "swin" in case.name or "maxvit" in case.name:  # windows are cut after the norm
            assert (ours is None) == ("swin-2" in case.name)
        elif gain is None or name.endswith(("encoder_attn", "multihead_attn", "EncDecAttention")):
            assert ours is None, name
        else:
            assert ours is not None, name
            torch.testing.assert_close(ours, gain.detach(), rtol=2e-5, atol=2e-5)


SCALES = {
    "timm-vit-registers-sdpa": "blocks.0.ls1.gamma",
    "timm-deit-3-sdpa": "blocks.0.ls1.gamma",
    "timm-eva-fused-sdpa": "blocks.0.gamma_1",
    "timm-dinov3-sdpa": "blocks.0.gamma_1",
    "timm-beit-sdpa": "blocks.0.gamma_1",
    "timm-cait-sdpa": "blocks.0.gamma_1",
    "dinov2-sdpa": "layer.0.layer_scale1.lambda1",
    "dinov3-sdpa": "model.layer.0.layer_scale1.lambda1",
    "dinov2-hub-sdpa": "blocks.0.ls1.gamma",
    "dinov3-hub": "blocks.0.ls1.gamma",
    "open_clip-layer-scale": "visual.transformer.resblocks.0.ls_1.gamma",
}


@pytest.mark.parametrize("name", SCALES)
def test_layer_scale_is_the_block_s_own(name: str) -> None:
    model, _ = build(name)
    path = SCALES[name]
    parameter = next(
        (p for given, p in model.named_parameters() if given == path or given.endswith("." + path)),
        None,
    )
    if parameter is None:
        similar = [given for given, _ in model.named_parameters() if path[-6:] in given]
        pytest.fail(f"{path} is not among {similar}")
    first = next(site for site in attention_sites(model).values() if site.layer_scale is not None)
    assert torch.equal(first.layer_scale, parameter)


def test_models_without_layer_scale_have_none() -> None:
    for name in ("timm-vit-sdpa", "vit-sdpa", "llama-sdpa", "open_clip", "bert-sdpa", "nn-encoder"):
        model, _ = build(name)
        assert all(site.layer_scale is None for site in attention_sites(model).values())


class SelfAttention(nn.Module):
    """transformers 4.x: `attention.attention` of ViT, DINOv2 and their kin."""

    def __init__(self, heads: int, dim: int) -> None:
        super().__init__()
        self.num_attention_heads, self.attention_head_size = heads, dim // heads
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return out.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """The output projection is a separate module beside the attention."""

    def __init__(self, heads: int, dim: int) -> None:
        super().__init__()
        self.attention = SelfAttention(heads, dim)
        self.output = nn.Module()
        self.output.dense = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.output.dense(self.attention(x))


class Layer(nn.Module):
    """A block of transformers 4.x's DINOv2."""

    def __init__(self) -> None:
        super().__init__()
        self.layernorm_before, self.attention = nn.LayerNorm(30), Attention(5, 30)
        self.layer_scale1 = nn.Module()
        self.layer_scale1.lambda1 = nn.Parameter(torch.rand(30))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.layernorm_before(x)) * self.layer_scale1.lambda1


def test_layouts_of_transformers_4() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer())
    x = torch.randn(2, 7, 30)
    sites = attention_sites(model)
    assert list(sites) == ["0.attention.attention", "1.attention.attention"]
    for record, layer in zip(records(model, (x,), sites=sites), model, strict=True):
        site: AttentionSite | None = record.site
        assert site is not None and site.o is not None
        update = torch.einsum("hov,bhtv->bto", site.o, record.out)
        update = (update + layer.attention.output.dense.bias) * site.layer_scale
        with torch.no_grad():
            torch.testing.assert_close(record.residual + update, layer(record.residual))
        assert torch.equal(site.input_gain, layer.layernorm_before.weight)
        assert torch.equal(site.q.flatten(0, 1), layer.attention.attention.query.weight)


def test_sites_are_views_that_cost_no_memory() -> None:
    model, _ = build("llama-sdpa")
    site = attention_sites(model)["model.layers.0.self_attn"]
    weight = model.model.layers[0].self_attn.q_proj.weight
    assert site.q.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    assert not site.q.requires_grad
