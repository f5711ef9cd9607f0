"""The broadcast task: samples, targets, training; and the model of both tasks."""

from dataclasses import replace

import pytest
import torch

from sinkwise.errors import InputError
from sinkwise.synthetic.broadcast import CONCAVE_FLOOR, Broadcast
from sinkwise.synthetic.model import AttentionOnly
from tests.synthetic import relative_error, same_weights, signature

SMALL = Broadcast(dim=7, length=5, seed=3)


def test_targets_follow_the_formula():
    inputs, targets, source = SMALL.sample(torch.Generator().manual_seed(1), 29)
    mix = SMALL.fixed()["mix"]
    assert inputs.shape == targets.shape == (29, 5, 7)
    assert source.unique().tolist() == [0, 1, 2, 3, 4]
    for x, y, p in zip(inputs, targets, source, strict=True):
        for token, target in zip(x, y, strict=True):
            torch.testing.assert_close(target, token + mix @ x[p])


def test_one_token_is_marked_and_the_payload_has_no_constant():
    inputs, _, source = SMALL.sample(torch.Generator().manual_seed(1), 11)
    fixed = SMALL.fixed()
    half = 0.5 * 7**0.5
    marked = torch.nn.functional.one_hot(source, 5) * half
    torch.testing.assert_close(inputs @ fixed["marker"], marked)
    torch.testing.assert_close(inputs @ fixed["common"], torch.full((11, 5), half))
    for direction in ("marker", "common"):
        assert (fixed["mix"] @ fixed[direction]).abs().max() < 1e-5


def test_given_fixed_vectors_replace_the_seed():
    other = replace(SMALL, seed=4)
    samples = [
        task.sample(torch.Generator().manual_seed(1), 3, SMALL.fixed())[1]
        for task in (SMALL, other)
    ]
    assert torch.equal(*samples)
    assert not torch.equal(samples[1], other.sample(torch.Generator().manual_seed(1), 3)[1])


def test_few_steps_reduce_the_loss():
    losses = []
    task = Broadcast(steps=120)
    model = task.train(lambda step, loss: losses.append((step, loss)))
    assert [step for step, _ in losses] == list(range(120))
    assert losses[-1][1] < 0.5 * losses[0][1]
    assert not model.training
    inputs, targets, _ = task.sample(torch.Generator().manual_seed(9), 64)
    with torch.no_grad():
        assert relative_error(model(inputs), targets, inputs) < 0.5
        untrained = task.model(torch.Generator().manual_seed(0))(inputs)
    assert relative_error(untrained, targets, inputs) > 0.5


def test_without_deep_supervision_the_layers_share_the_work():
    task = Broadcast(modular="none")
    model = task.train()
    inputs, _, source = task.sample(torch.Generator().manual_seed(9), 64)
    first = signature(model.layers[0].attention, inputs, source)
    with torch.no_grad():
        second = signature(model.layers[1].attention, model.states(inputs)[0], source)
    assert second.update.norm() > 0.2 * first.update.norm()


def test_training_depends_on_the_seed_alone():
    task = Broadcast(steps=20)
    state = torch.get_rng_state()
    first = task.train()
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    assert same_weights(first, task.train())
    assert not same_weights(first, replace(task, seed=1).train())


@pytest.mark.parametrize("wrong", [{"dim": 2}, {"length": 0}])
def test_unusable_settings_are_named(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        Broadcast(**wrong)


def test_model_is_attention_and_residual_only():
    model = AttentionOnly(6, num_heads=2, num_layers=3, generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1))
    state = x
    with torch.no_grad():
        for layer in model.layers:
            w = {name: p.view(2, 3, 6) for name, p in layer.attention.named_parameters()}
            q, k, v = (
                torch.einsum("bnd,hed->bhne", state, w[f"{name}_proj.weight"]) for name in "qkv"
            )
            weights = (torch.einsum("bhqe,bhke->bhqk", q, k) / 3**0.5).softmax(-1)
            heads = torch.einsum("bhqk,bhke->bqhe", weights, v).reshape(2, 5, 6)
            state = state + heads @ layer.attention.o_proj.weight.T
        states = model.states(x)
        assert len(states) == 3
        torch.testing.assert_close(states[-1], state)
        assert torch.equal(model(x), states[-1])
    std = torch.cat([p.flatten() for p in model.parameters()]).std()
    assert std.item() == pytest.approx(0.1, rel=0.15)


@pytest.mark.parametrize(
    "wrong", [{"num_heads": 4}, {"num_heads": 0}, {"num_layers": 0}, {"num_registers": -1}]
)
def test_impossible_models_are_refused(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        AttentionOnly(6, **wrong)


def test_losses_follow_their_formulas():
    sample = SMALL.sample(torch.Generator().manual_seed(1), 3)
    for modular in ("none", "deep", "concave"):
        task = replace(SMALL, modular=modular, num_registers=2, local=True)
        model = task.model(torch.Generator().manual_seed(0))
        states = [state[:, 2:] for state in model.states(sample.inputs)]
        wanted = (states[1] - sample.targets).square().mean()
        if modular == "deep":
            wanted = wanted + 0.3 * (states[0] - sample.targets).square().mean()
        if modular == "concave":
            for before, after in ((sample.inputs, states[0]), (states[0], states[1])):
                wanted = wanted + 0.2 * ((after - before).square().mean() + CONCAVE_FLOOR) ** 0.25
        torch.testing.assert_close(task.loss(model, sample), wanted)


def test_local_tokens_see_themselves_and_the_registers():
    model = AttentionOnly(
        6, num_registers=2, local=True, generator=torch.Generator().manual_seed(0)
    )
    x = torch.randn(1, 5, 6, generator=torch.Generator().manual_seed(1))
    assert model(x).shape == x.shape and model.states(x)[0].shape == (1, 7, 6)
    jacobian = torch.autograd.functional.jacobian(lambda y: model.states(y)[0], x)[0, :, :, 0]
    reads = jacobian.abs().sum((1, 3)) > 0
    wanted = torch.cat([torch.ones(2, 5), torch.eye(5)]).bool()
    assert torch.equal(reads, wanted)
