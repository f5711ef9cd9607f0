"""Measured sites: the Jacobian of what was captured is the weight, and nothing is left behind."""

import pytest
import torch
from torch import nn

import sinkwise as sw
from sinkwise.capturing.jacobian import measured_sites
from tests.capturing.test_capture import _state
from tests.models import build, run


class Plain(nn.Module):
    """Attention whose weights no layout names."""

    def __init__(self, heads: int = 3, dim: int = 24, kv_heads: int = 3) -> None:
        super().__init__()
        self.a, self.b, self.c = (
            nn.Linear(dim, n * dim // heads) for n in (heads, kv_heads, kv_heads)
        )
        self.d, self.heads = nn.Linear(dim, dim), heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        width = x.shape[-1] // self.heads
        q, k, v = (
            part(x).unflatten(-1, (-1, width)).transpose(1, 2) for part in (self.a, self.b, self.c)
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.d(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kv_heads", [1, 3])
def test_weights_by_head(kv_heads: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Plain(kv_heads=kv_heads))
    site = measured_sites(model, ["0"], torch.randn(2, 7, 24))["0"]
    part = model[0]
    assert site.source == "jacobian" and site.layer_scale is None
    for ours, linear in ((site.q, part.a), (site.k, part.b), (site.v, part.c)):
        torch.testing.assert_close(ours.flatten(0, 1), linear.weight, rtol=1e-5, atol=1e-6)
    wanted = part.d.weight.unflatten(1, (3, 8)).transpose(0, 1)
    torch.testing.assert_close(site.o, wanted, rtol=1e-5, atol=1e-6)


class Flexible(Plain):
    """The same by FlexAttention, which has no gradients on a CPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        width = x.shape[-1] // self.heads
        q, k, v = (
            part(x).unflatten(-1, (-1, width)).transpose(1, 2) for part in (self.a, self.b, self.c)
        )
        out = flex_attention(q, k, v, enable_gqa=True)
        return self.d(out.transpose(1, 2).flatten(2))


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_flex_attention_s_weights_by_head(kv_heads: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Flexible(kv_heads=kv_heads))
    x = torch.randn(2, 7, 24)
    before = _state(model)
    site = measured_sites(model, ["0"], x)["0"]
    assert _state(model) == before
    part = model[0]
    for ours, linear in ((site.q, part.a), (site.k, part.b), (site.v, part.c)):
        torch.testing.assert_close(ours.flatten(0, 1), linear.weight, rtol=1e-5, atol=1e-6)
    wanted = part.d.weight.unflatten(1, (3, 8)).transpose(0, 1)
    torch.testing.assert_close(site.o, wanted, rtol=1e-5, atol=1e-6)
    scan = sw.scan(model, [x], rules="mean")
    assert scan.meta["sites_measured"] == ["0"] and scan.meta["output_unknown"] == []


class Beside(nn.Module):
    """BERT's way: the heads come out side by side, their projection lies elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Plain()
        self.inner.d = nn.Identity()
        self.outer = nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x))


class Squared(Plain):
    """Its output is no linear image of the heads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) ** 2


def test_no_output_projection_where_there_is_none() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 7, 24)
    assert measured_sites(Beside(), ["inner"], x)["inner"].o is None
    assert measured_sites(nn.Sequential(Squared()), ["0"], x)["0"].o is None


def test_self_attention_given_one_tensor_three_times() -> None:
    model, inputs = build("nn-encoder")
    name = "layers.0.self_attn"
    site = measured_sites(model, [name], inputs)[name]
    weight = model.layers[0].self_attn.in_proj_weight
    measured = torch.cat([part.flatten(0, 1) for part in (site.q, site.k, site.v)])
    torch.testing.assert_close(measured, weight, rtol=1e-5, atol=1e-6)


def test_channels_are_no_tokens() -> None:
    model, inputs = build("timm-xcit-sdpa")
    site = measured_sites(model, ["blocks.0.attn"], inputs)["blocks.0.attn"]
    assert site.q is None and site.k is None and site.o is None


@pytest.mark.parametrize("name", ["llama-sdpa", "timm-vit-eager", "bert-sdpa"])
def test_no_trace_is_left(name: str) -> None:
    model, inputs = build(name)
    next(model.parameters()).requires_grad_(False)
    names = [path for path, _ in model.named_modules() if path.endswith(("attn", "self"))]
    with torch.no_grad():
        run(model, inputs)
    before = _state(model)
    assert measured_sites(model, names, inputs)
    assert _state(model) == before

    def stop(*_: object) -> None:
        raise ZeroDivisionError

    last = list(model.modules())[-1]
    hook = last.register_forward_pre_hook(stop)
    with pytest.raises(ZeroDivisionError):
        measured_sites(model, names, inputs)
    hook.remove()
    assert _state(model) == before


def test_unknown_names_give_nothing() -> None:
    model, inputs = build("timm-vit-sdpa")
    assert measured_sites(model, ["nowhere"], inputs) == {}
