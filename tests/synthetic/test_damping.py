"""The conditional damping task: its samples, its targets, its training."""

from dataclasses import replace

import pytest
import torch

from sinkwise.errors import InputError
from sinkwise.synthetic.damping import Damping
from tests.synthetic import relative_error, same_weights

SMALL = Damping(dim=7, length=5, seed=3)


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


def test_flag_and_null_are_readable_alone():
    inputs, _, aligned = SMALL.sample(torch.Generator().manual_seed(1), 11)
    fixed = SMALL.fixed()
    torch.testing.assert_close(inputs[:, 0], (7**0.5 * fixed["null"]).expand(11, -1))
    sign = torch.where(aligned[:, 1:], 1.0, -1.0)
    torch.testing.assert_close(inputs[:, 1:] @ fixed["flag"], 0.5 * 7**0.5 * sign)
    assert (inputs[:, 1:] @ fixed["null"]).abs().max() < 1e-5


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


def test_training_depends_on_the_seed_alone():
    task = Damping(steps=20)
    state = torch.get_rng_state()
    first = task.train()
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    assert same_weights(first, task.train())
    assert not same_weights(first, replace(task, seed=1).train())


@pytest.mark.parametrize("wrong", [{"dim": 2}, {"length": 0}, {"aligned_share": 1.1}])
def test_unusable_settings_are_named(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        Damping(**wrong)
