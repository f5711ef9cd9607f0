"""`device=` and `dtype=` of every module, as torch's own modules take them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sinkwise.nn import (
    GatedAttention,
    GlobalPathway,
    OutputGate,
    RegisterTokens,
    SinkLogitAttention,
    SinkToken,
    SoftmaxOne,
)


def attention(**given: Any) -> nn.Module:
    """Attention with every parameter that it can have."""
    return GatedAttention(
        12, 3, num_kv_heads=1, softmax="learnable", qkv_bias=True, out_bias=True, **given
    )


MAKE: dict[str, Callable[..., nn.Module]] = {
    "attention": attention,
    "gate": lambda **given: OutputGate(12, 3, **given),
    "headwise gate": lambda **given: OutputGate(12, 3, kind="headwise", in_dim=5, **given),
    "pathway": lambda **given: GlobalPathway(6, **given),
    "registers": lambda **given: RegisterTokens(3, 5, **given),
    "sink logit": lambda **given: SinkLogitAttention(4, init=-2.0, **given),
    "sink token": lambda **given: SinkToken(5, **given),
}
KEYS = {
    "attention": {
        "q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias", "v_proj.weight",
        "v_proj.bias", "o_proj.weight", "o_proj.bias", "gate.proj.weight", "gate.proj.bias",
        "sink.logit",
    },
    "gate": {"proj.weight", "proj.bias"},
    "headwise gate": {"proj.weight", "proj.bias"},
    "pathway": {"score.weight", "v_proj.weight", "gate.proj.weight", "gate.proj.bias"},
    "registers": {"tokens"},
    "sink logit": {"logit"},
    "sink token": {"vector"},
}  # fmt: skip
SUMS = {
    "attention": 30.129527009,
    "gate": 24.10428868,
    "headwise gate": 6.0101992,
    "pathway": 12.44593225,
    "registers": 0.20398502,
    "sink logit": 8.0,
    "sink token": 0.03453976,
}
"""Sum of absolute values of all parameters, drawn after torch.manual_seed(3)."""
NEXT = {
    "attention": 0.68082494,
    "gate": 0.32841891,
    "headwise gate": 0.13936210,
    "pathway": 0.59297377,
    "registers": 0.13936210,
    "sink logit": 0.00426352,
    "sink token": 0.14984089,
}
"""The next number of the global random state: how much was drawn from it."""
modules = pytest.mark.parametrize("name", MAKE)


@modules
def test_default_draws_and_keys_are_fixed(name: str) -> None:
    """Seeded runs stay reproducible: these numbers predate `device=` and `dtype=`."""
    torch.manual_seed(3)
    module = MAKE[name]()
    assert set(module.state_dict()) == KEYS[name]
    total = sum(float(value.detach().double().abs().sum()) for value in module.parameters())
    assert total == pytest.approx(SUMS[name], rel=1e-7)
    assert torch.rand(1).item() == pytest.approx(NEXT[name], rel=1e-5)
    assert {value.dtype for value in module.parameters()} == {torch.float32}


@modules
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtype(name: str, dtype: torch.dtype) -> None:
    module = MAKE[name](dtype=dtype)
    assert {value.dtype for value in module.parameters()} == {dtype}
    assert set(module.state_dict()) == KEYS[name]
    assert all(value.isfinite().all() for value in module.parameters())


@modules
def test_default_dtype(name: str) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert {value.dtype for value in MAKE[name]().parameters()} == {torch.float64}
    finally:
        torch.set_default_dtype(before)


@modules
def test_meta_device(name: str) -> None:
    """Nothing is drawn, and weights can be loaded afterwards."""
    torch.manual_seed(3)
    state = torch.get_rng_state()
    module = MAKE[name](device="meta", dtype=torch.float64)
    assert torch.equal(torch.get_rng_state(), state)
    assert {value.device.type for value in module.parameters()} == {"meta"}
    trained = MAKE[name](dtype=torch.float64)
    module.to_empty(device="cpu").load_state_dict(trained.state_dict())
    for key, value in trained.state_dict().items():
        assert torch.equal(module.state_dict()[key], value)


@modules
def test_device_context(name: str) -> None:
    with torch.device("meta"):
        inside, explicit = MAKE[name](), MAKE[name](device="cpu")
    assert {value.device.type for value in inside.parameters()} == {"meta"}
    assert {value.device.type for value in explicit.parameters()} == {"cpu"}
    assert {value.device.type for value in MAKE[name]().parameters()} == {"cpu"}


GENERATED = [name for name in MAKE if name not in ("sink logit", "sink token")]


@pytest.mark.parametrize("name", GENERATED)
def test_a_generator_leaves_the_global_random_state_alone(name: str) -> None:
    state = torch.get_rng_state()
    one, other = (MAKE[name](generator=torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    for key, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[key])


def test_softmax_one_has_no_parameters_and_keeps_the_dtype() -> None:
    module = SoftmaxOne()
    assert not module.state_dict()
    for dtype in (torch.float64, torch.bfloat16):
        assert module(torch.zeros(3, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_they_compute_in_that_dtype(dtype: torch.dtype) -> None:
    x = torch.randn(2, 7, 12, dtype=dtype)
    real = torch.ones(2, 7, dtype=torch.bool)
    for module in (attention(dtype=dtype), GlobalPathway(12, dtype=dtype)):
        assert module(x, real).dtype == dtype
    assert OutputGate(12, 3, dtype=dtype)(x, x).dtype == dtype
    assert RegisterTokens(3, 12, dtype=dtype)(x).dtype == dtype
    assert SinkToken(12, dtype=dtype)(x).dtype == dtype
    heads = torch.randn(2, 3, 7, 4, dtype=dtype)
    assert SinkLogitAttention(3, dtype=dtype)(heads, heads, heads).dtype == dtype
