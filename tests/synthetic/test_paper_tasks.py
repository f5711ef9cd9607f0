"""The authors' forms of both tasks: samples, targets and models against their formulas."""

import pytest
import torch

from sinkwise.errors import InputError
from sinkwise.synthetic.paper_tasks import CausalDamping, PreNormBroadcast, SweepDamping


@pytest.mark.parametrize("form", [CausalDamping, SweepDamping])
@pytest.mark.parametrize(("threshold", "gamma"), [(0.0, 0.0), (0.7, 0.1), (10.0, 0.0)])
def test_authors_targets_follow_the_formula(form, threshold, gamma):
    task = form(dim=7, length=5, threshold=threshold, gamma=gamma, seed=3)
    direction = task.fixed()["direction"]
    inputs, targets, nop = task.sample(torch.Generator().manual_seed(1), 11)
    assert inputs.shape == targets.shape == (11, 6, 7) and nop.shape == (11, 6)
    assert direction.norm().item() == pytest.approx(1.0)
    assert not inputs[:, 0].any() and not targets[:, 0].any() and not nop[:, 0].any()
    for x, y, flags in zip(inputs, targets, nop, strict=True):
        for token, target, flag in zip(x[1:], y[1:], flags[1:], strict=True):
            active = float(direction @ token) > threshold
            assert flag.item() is not active
            torch.testing.assert_close(target, gamma * token if active else token)


def test_share_of_nop_queries():
    for threshold, share in ((0.0, 0.5), (1.0, 0.8413), (-1.0, 0.1587), (10.0, 1.0)):
        task = SweepDamping(threshold=threshold)
        assert task.nop_share == pytest.approx(share, abs=1e-4)
        nop = task.sample(torch.Generator().manual_seed(1), 400).marks[:, 1:]
        assert nop.float().mean().item() == pytest.approx(share, abs=0.02)


def test_authors_models_follow_their_formulas():
    x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1))
    for form, normed in ((CausalDamping, False), (SweepDamping, True)):
        model = form(dim=6, length=3).model(torch.Generator().manual_seed(0))
        read = x + model.positions
        if normed:
            centred = read - read.mean(-1, keepdim=True)
            read = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        q, k, v = (read @ getattr(model.attention, f"{n}_proj").weight.T for n in "qkv")
        weights = (torch.einsum("bqd,bkd->bqk", q, k) / 6**0.5).softmax(-1)
        update = torch.einsum("bqk,bkd->bqd", weights, v) @ model.attention.o_proj.weight.T
        torch.testing.assert_close(model(x), (read if normed else x) + update)


def test_authors_forms_have_neither_registers_nor_sink_logits_nor_pathways():
    with pytest.raises(InputError, match="num_registers=1 must be 0"):
        CausalDamping(num_registers=1)
    for changes in ({"softmax": "learnable"}, {"pathway": True}):
        with pytest.raises(InputError, match=r"must be 'vanilla' and False"):
            CausalDamping(**changes)


def test_authors_broadcast_and_its_model_follow_their_formulas():
    task = PreNormBroadcast(dim=7, length=5, seed=3)
    fixed = task.fixed()
    inputs, targets, source = task.sample(torch.Generator().manual_seed(1), 11)
    torch.testing.assert_close(fixed["mix"] @ fixed["mix"].T, torch.eye(7), atol=1e-5, rtol=0)
    for x, y, p in zip(inputs, targets, source, strict=True):
        assert max(range(5), key=lambda i: float(x[i] @ fixed["direction"])) == p
        for token, target in zip(x, y, strict=True):
            torch.testing.assert_close(target, token + fixed["mix"] @ x[p])
    model = task.model(torch.Generator().manual_seed(0))
    state = inputs
    for layer in model.layers:
        state = state + layer.attention(layer.norm1(state))
        wide, _, narrow = layer.mlp
        hidden = torch.nn.functional.gelu(layer.norm2(state) @ wide.weight.T + wide.bias)
        assert wide.weight.shape == (28, 7)
        state = state + hidden @ narrow.weight.T + narrow.bias
    torch.testing.assert_close(model(inputs), state)
    with pytest.raises(InputError, match="num_registers=1 must be 0"):
        PreNormBroadcast(num_registers=1)
