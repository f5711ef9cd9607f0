"""The global pathway and the common-mode penalty against loops and closed forms."""

import math

import pytest
import torch

from sinkwise.errors import InputError
from sinkwise.nn.global_pathway import GlobalPathway, common_mode_penalty

REAL = torch.tensor([[True] * 7, [False, False, True, True, True, True, False], [False] * 7])


def pathway(gate="elementwise"):
    module = GlobalPathway(5, gate=gate, generator=torch.Generator().manual_seed(0)).double()
    random = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, generator=random)
    return module


def tokens():
    return torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.mark.parametrize("gate", ["elementwise", "headwise"])
@pytest.mark.parametrize("masked", [False, True])
def test_formula(gate, masked):
    module, x = pathway(gate), tokens()
    found = module(x, REAL if masked else None)
    w, value = module.score.weight[0].tolist(), module.v_proj.weight.tolist()
    gate_weight, gate_bias = module.gate.proj.weight.tolist(), module.gate.proj.bias.tolist()
    for b in range(3):
        pooled = [j for j in range(7) if REAL[b, j] or not masked]
        row = x[b].tolist()
        powers = {j: math.exp(sum(w[c] * row[j][c] for c in range(5))) for j in pooled}
        total = sum(powers.values())
        for channel in range(5):
            told = sum(
                powers[j] / total * sum(value[channel][c] * row[j][c] for c in range(5))
                for j in pooled
            )
            out = channel if gate == "elementwise" else 0
            for i in range(7):
                score = sum(gate_weight[out][c] * row[i][c] for c in range(5)) + gate_bias[out]
                wanted = told / (1 + math.exp(-score))
                assert found[b, i, channel].item() == pytest.approx(wanted, rel=1e-12, abs=1e-15)


def test_padding_is_not_read_even_if_it_is_nan():
    module, x = pathway(), tokens()
    broken = x.masked_fill(~REAL[..., None], math.nan)
    assert torch.equal(module.pool(broken, REAL), module.pool(x, REAL))
    assert (module.pool(broken, REAL)[2] == 0).all()
    module.pool(broken, REAL).square().sum().backward()
    assert torch.isfinite(module.score.weight.grad).all()
    assert not torch.equal(module.pool(x), module.pool(x, REAL))


def test_starts_as_a_gated_mean_of_the_tokens():
    module = GlobalPathway(64, generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, 11, 64)
    torch.testing.assert_close(module.pool(x), module.v_proj(x.mean(1)))
    assert module.v_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    again = GlobalPathway(64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(module.v_proj.weight, again.v_proj.weight)


def test_every_parameter_gets_a_gradient_from_the_start():
    module = GlobalPathway(5)
    module(tokens().float(), REAL).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert torch.isfinite(parameter.grad).all() and parameter.grad.abs().sum() > 0, name
    assert list(module.state_dict()) == [
        "score.weight",
        "v_proj.weight",
        "gate.proj.weight",
        "gate.proj.bias",
    ]


def test_gradients():
    module = pathway()
    assert torch.autograd.gradcheck(lambda x: module(x, REAL), tokens().requires_grad_())
    assert torch.autograd.gradcheck(
        lambda x: common_mode_penalty(x, REAL), tokens().requires_grad_()
    )


def fraction(update):
    """E(mean_i o_i) / E(o), one entry at a time."""
    count, width = len(update), len(update[0])
    common = sum((sum(row[c] for row in update) / count) ** 2 for c in range(width)) / width
    return common / (sum(value**2 for row in update for value in row) / count / width)


def test_penalty_against_a_loop():
    o = tokens()
    wanted = sum(fraction(sample.tolist()) for sample in o) / 3
    assert common_mode_penalty(o).item() == pytest.approx(0.1 * wanted, rel=1e-12)
    assert common_mode_penalty(o, weight=3.0).item() == pytest.approx(3 * wanted, rel=1e-12)
    # The third sample is all padding and adds 0.
    wanted = (fraction(o[0].tolist()) + fraction(o[1, 2:6].tolist())) / 3
    assert common_mode_penalty(o, REAL).item() == pytest.approx(0.1 * wanted, rel=1e-12)
    broken = o.masked_fill(~REAL[..., None], math.nan)
    assert torch.equal(common_mode_penalty(broken, REAL), common_mode_penalty(o, REAL))


def test_penalty_of_closed_forms():
    same = torch.randn(2, 1, 5).expand(2, 7, 5)
    assert common_mode_penalty(same, weight=1.0).item() == pytest.approx(1)
    assert common_mode_penalty(torch.eye(7)[None], weight=1.0).item() == pytest.approx(1 / 7)
    opposite = torch.stack([torch.ones(1, 5), -torch.ones(1, 5)], dim=1)
    assert common_mode_penalty(opposite).item() == 0
    assert common_mode_penalty(1000 * same.half(), weight=1.0).item() == pytest.approx(1)


def test_an_update_of_zero_costs_nothing_and_has_no_gradient():
    zero = torch.zeros(2, 7, 5, requires_grad=True)
    penalty = common_mode_penalty(zero)
    penalty.backward()
    assert penalty.item() == 0 and (zero.grad == 0).all()


def test_unusable_masks_are_named():
    x = tokens().float()
    for real in (REAL.long(), REAL[:, :6]):
        with pytest.raises(InputError, match=r"real, torch.*must be bool \(3, 7\)"):
            GlobalPathway.pool.__wrapped__(GlobalPathway(5), x, real)
        with pytest.raises(InputError, match=r"real, torch.*must be bool \(3, 7\)"):
            common_mode_penalty.__wrapped__(x, real)
