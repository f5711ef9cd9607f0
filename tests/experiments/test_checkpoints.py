"""A saved model is loaded instead of trained, if everything that determines it is the same."""

import math

from sinkwise.experiments import checkpoints
from sinkwise.experiments.experiment_run import run_experiment
from sinkwise.storage.own_code import own_code
from tests.experiments import shortened


def test_a_saved_model_of_other_training_code_is_trained_again(tmp_path, monkeypatch):
    assert own_code("synthetic") != own_code("nn") != own_code()
    run_experiment(shortened("nop"), 1, checkpoints=tmp_path)
    monkeypatch.setattr(checkpoints, "own_code", lambda *packages: "another")
    steps = []
    run_experiment(shortened("nop"), 1, lambda step, loss: steps.append(loss), checkpoints=tmp_path)
    assert not any(math.isnan(loss) for loss in steps)


def test_a_saved_model_is_not_trained_again(tmp_path):
    chosen, steps = shortened("nop", mitigation="gate"), []
    one = run_experiment(chosen, 1, checkpoints=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["nop-fast-gate-1.safetensors"]

    def count(step, loss):
        steps.append(loss)

    two = run_experiment(chosen, 1, count, checkpoints=tmp_path)
    assert len(steps) == 40 and all(math.isnan(loss) for loss in steps)
    assert two.losses == one.losses and two.rows.equals(one.rows)
    assert not two.model.training
    other = shortened("nop", mitigation="gate", steps=41)
    changed = run_experiment(other, 1, checkpoints=tmp_path)
    assert changed.losses != one.losses, "another task is trained again"
    (tmp_path / "nop-fast-gate-1.safetensors").write_bytes(b"broken")
    assert run_experiment(chosen, 1, checkpoints=tmp_path).rows.equals(one.rows)
    assert run_experiment(chosen, 2, checkpoints=tmp_path).seed == 2
    assert len(list(tmp_path.iterdir())) == 2
