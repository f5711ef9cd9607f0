"""The conditional damping task: samples, targets, training."""

from dataclasses import replace

import pytest
import torch

from sinkwise.errors import InputError
from sinkwise.synthetic.broadcast import Broadcast
from sinkwise.synthetic.damping import Damping
from tests.synthetic import relative_error, same_weights

SMALL = Damping(dim=7, length=5, null_norm=1.0, seed=3)


def test_targets_follow_the_formula():
    inputs, targets, aligned = SMALL.sample(torch.Generator().manual_seed(1), 11)
    fixed = SMALL.fixed()
    assert inputs.shape == targets.shape == (11, 6, 7)
    assert aligned.shape == (11, 6) and not aligned[:, 0].any()
    assert aligned.any() and not aligned[:, 1:].all()
    for x, y, flags in zip(inputs, targets, aligned, strict=True):
        mean = sum(fixed["mix"] @ token for token in x[1:]) / 5
        torch.testing.assert_close(y[0], x[0])
        for token, target, flag in zip(x[1:], y[1:], flags[1:], strict=True):
            torch.testing.assert_close(target, token if flag else token + mean)


def test_flag_and_null_are_orthogonal_to_the_content():
    inputs, _, aligned = SMALL.sample(torch.Generator().manual_seed(1), 11)
    fixed = SMALL.fixed()
    torch.testing.assert_close(inputs[:, 0], (7**0.5 * fixed["null"]).expand(11, -1))
    sign = torch.where(aligned[:, 1:], 1.0, -1.0)
    torch.testing.assert_close(inputs[:, 1:] @ fixed["flag"], 0.5 * 7**0.5 * sign)
    assert (inputs[:, 1:] @ fixed["null"]).abs().max() < 1e-5


def test_null_token_can_be_shorter_or_absent():
    short = replace(SMALL, null_norm=0.25).sample(torch.Generator().manual_seed(1), 3).inputs
    assert short[:, 0].norm(dim=-1).tolist() == pytest.approx([0.25 * 7**0.5] * 3)
    task = replace(SMALL, null_norm=None)
    inputs, targets, aligned = task.sample(torch.Generator().manual_seed(1), 3)
    assert inputs.shape == targets.shape == (3, 5, 7) and aligned.shape == (3, 5)
    assert (task.num_unscored, SMALL.num_unscored) == (0, 1)
    torch.testing.assert_close(
        inputs, SMALL.sample(torch.Generator().manual_seed(1), 3).inputs[:, 1:]
    )


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_aligned_share(share):
    task = replace(SMALL, aligned_share=share)
    _, _, aligned = task.sample(torch.Generator().manual_seed(1), 2000)
    assert aligned[:, 1:].float().mean().item() == pytest.approx(share, abs=0.02)


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
    task = Damping(steps=120)
    model = task.train(lambda step, loss: losses.append((step, loss)))
    assert [step for step, _ in losses] == list(range(120))
    assert losses[-1][1] < 0.5 * losses[0][1]
    assert not model.training
    inputs, targets, _ = task.sample(torch.Generator().manual_seed(9), 64)
    with torch.no_grad():
        assert relative_error(model(inputs)[:, 1:], targets[:, 1:], inputs[:, 1:]) < 0.5
        untrained = task.model(torch.Generator().manual_seed(0))(inputs)
    assert relative_error(untrained[:, 1:], targets[:, 1:], inputs[:, 1:]) > 0.5


@pytest.mark.parametrize("changes", [{}, {"gate": "headwise"}, {"pathway": True}])
def test_training_depends_on_the_seed_alone(changes):
    task = Damping(steps=20, **changes)
    state = torch.get_rng_state()
    first = task.train()
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    assert same_weights(first, task.train())
    assert not same_weights(first, replace(task, seed=1).train())


@pytest.mark.parametrize(
    "wrong", [{"dim": 2}, {"length": 0}, {"aligned_share": 1.1}, {"null_norm": 0.0}, {"steps": 0}]
)
def test_unusable_settings_are_named(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        Damping(**wrong)


def test_all_content_has_the_common_direction():
    task = Damping(dim=7, length=5, common_norm=0.5)
    fixed = task.fixed()
    plain = Damping(dim=7, length=5)
    assert set(fixed) - set(plain.fixed()) == {"common"}
    inputs, _, aligned = task.sample(torch.Generator().manual_seed(1), 11)
    along = inputs[:, 1:] @ fixed["common"]
    torch.testing.assert_close(along, torch.full_like(along, 0.5 * 7**0.5))
    assert (inputs[:, 0] @ fixed["common"]).abs().max() < 1e-6, "the null token does not have it"
    flags = inputs[:, 1:] @ fixed["flag"]
    assert torch.equal(flags > 0, aligned[:, 1:])
    with pytest.raises(InputError, match="common_norm=-1"):
        Damping(common_norm=-1.0)


@pytest.mark.parametrize("task", [Damping(pathway=True), Broadcast(pathway=True, modular="none")])
def test_the_pathways_penalty_is_on_the_attention_updates(task):
    model = task.model(torch.Generator().manual_seed(0))
    sample = task.sample(torch.Generator().manual_seed(1), 11)
    added = []
    for layer in model.layers:
        layer.attention.register_forward_hook(lambda module, args, out: added.append(out))
    wrong = (model(sample.inputs) - sample.targets)[:, task.num_unscored :].square().mean()
    shares = [(u.mean(1).square().mean(-1) / u.square().mean((1, 2))).mean() for u in added]
    assert len(shares) == len(model.layers)
    torch.testing.assert_close(task.loss(model, sample), wrong + 0.1 * sum(shares))
    plain = replace(task, pathway=False)
    assert not any("pathway" in name for name, _ in plain.model(torch.Generator()).named_modules())


def test_constant_learning_rate_differs_from_a_decaying_one():
    task = Damping(steps=80)
    assert not same_weights(task.train(), replace(task, decay=False).train())
