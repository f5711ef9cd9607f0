"""What a run records, and that the seed determines it."""

import pytest
import torch

from sinkwise.experiments.experiment_run import run_experiment
from tests.experiments import shortened


def test_everything_follows_from_the_seed():
    one, two = (run_experiment(shortened("nop"), 3) for _ in range(2))
    assert one.losses == two.losses and one.error == two.error
    assert one.rows.equals(two.rows) and one.scan.events.equals(two.scan.events)
    assert not one.rows.equals(run_experiment(shortened("nop"), 4).rows)


def test_what_a_run_records():
    steps = []
    one = run_experiment(
        shortened("broadcast", steps=450), 0, lambda step, loss: steps.append(step)
    )
    assert steps == list(range(450))
    assert 200 <= len(one.losses) <= 230 and one.losses[-1][0] == 449
    assert one.losses[-1][1] < one.losses[0][1]
    assert one.seed == one.experiment.task.seed == 0
    assert one.rows["layer"].to_list() == [0, 1] and len(one.before) == len(one.after) == 2
    assert one.rows["update_share"].sum() == pytest.approx(1.0)
    shares = [one.after[layer].update.square().mean().item() for layer in range(2)]
    assert one.rows["update_share"][0] == pytest.approx(shares[0] / sum(shares))
    assert not torch.equal(one.before[0].attention, one.after[0].attention)
    assert one.verdicts == one.scan.heads.sort("layer")["verdict"].to_list()
