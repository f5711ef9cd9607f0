"""The output gate against its formula, entry by entry."""

import math

import pytest
import torch

from sinkwise.errors import InputError
from sinkwise.nn.gate import OutputGate


def gate(kind, **changes):
    return OutputGate(6, 3, kind=kind, generator=torch.Generator().manual_seed(0), **changes)


@pytest.mark.parametrize("kind", ["elementwise", "headwise"])
def test_formula(kind):
    module = gate(kind, in_dim=5).double()
    torch.nn.init.normal_(module.proj.weight, generator=torch.Generator().manual_seed(1))
    heads, x = torch.randn(2, 7, 6).double(), torch.randn(2, 7, 5).double()
    found = module(heads, x)
    weight, bias = module.proj.weight.detach(), module.proj.bias.detach()
    for b in range(2):
        for n in range(7):
            for channel in range(6):
                row = channel if kind == "elementwise" else channel // 2
                score = sum(weight[row, i] * x[b, n, i] for i in range(5)) + bias[row]
                wanted = heads[b, n, channel] / (1 + math.exp(-score))
                assert found[b, n, channel].item() == pytest.approx(wanted.item(), rel=1e-12)
    factor = module.factor(x)
    assert factor.shape == (2, 7, 6 if kind == "elementwise" else 3)
    assert factor.min() > 0 and factor.max() < 1


def test_starts_nearly_open_and_the_same_for_all():
    module = OutputGate(64, 4, generator=torch.Generator().manual_seed(0))
    assert module.proj.weight.std().item() == pytest.approx(1e-3, rel=0.05)
    assert (module.proj.bias == 2).all()
    factor = module.factor(torch.randn(50, 64))
    assert (factor - 0.8808).abs().max() < 0.01


def test_leaves_the_global_random_state_alone():
    state = torch.get_rng_state()
    first, second = gate("headwise"), gate("headwise")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.proj.weight, second.proj.weight)


@pytest.mark.parametrize("kind", ["elementwise", "headwise"])
def test_every_parameter_and_both_inputs_get_a_gradient(kind):
    module = gate(kind)
    heads, x = torch.randn(2, 7, 6, requires_grad=True), torch.randn(2, 7, 6, requires_grad=True)
    module(heads, x).square().sum().backward()
    for tensor in (*module.parameters(), heads, x):
        assert tensor.grad is not None and tensor.grad.abs().sum() > 0


def test_unusable_settings_are_named():
    with pytest.raises(InputError, match="dim=6 must be a multiple of num_heads=4"):
        OutputGate(6, 4)
    # jaxtyping would refuse it first where the tests check types.
    with pytest.raises(Exception, match="open"):
        OutputGate(6, 3, kind="open")
