"""What a run keeps, and that its numbers follow from the seed."""

import math
from dataclasses import replace

import pytest
import torch

from sinkwise.experiments.cross import sweep_experiments
from sinkwise.experiments.edits import error_after
from sinkwise.experiments.running import layout_of, relative_error, run
from sinkwise.synthetic.forms import experiment


def short(kind, steps=40, **names):
    chosen = experiment(kind, **names)
    return replace(chosen, task=replace(chosen.task, steps=steps))


def test_everything_follows_from_the_seed():
    one, two = (run(short("nop"), 3) for _ in range(2))
    assert one.losses == two.losses and one.error == two.error
    assert one.rows.equals(two.rows) and one.scan.events.equals(two.scan.events)
    assert not one.rows.equals(run(short("nop"), 4).rows)


def test_what_is_kept():
    steps = []
    one = run(short("broadcast", steps=450), 0, lambda step, loss: steps.append(step))
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


def test_numbers_of_a_damping_row():
    one = run(short("nop", mitigation="gate"), 0)
    found, row = one.after[0], one.rows.to_dicts()[0]
    nop = one.sample.marks
    active = ~nop
    active[:, 0] = False
    count = int(nop.sum())
    wanted = sum(found.attention[b, q, 0].item() for b, q in nop.nonzero().tolist()) / count
    assert row["mass_nop"] == pytest.approx(wanted)
    assert row["gate_active"] == pytest.approx(found.gate[active].mean().item())
    received = found.attention.mean((0, 1))
    assert row["largest"] == pytest.approx(received.max().item())
    assert row["uniform"] == pytest.approx(1 / 17)
    assert math.isnan(row["register_to_source"])


def test_relative_error():
    chosen = short("nop")
    sample = chosen.task.sample(torch.Generator().manual_seed(0), 11)

    class Given(torch.nn.Module):
        def __init__(self, output):
            super().__init__()
            self.output = output

        def forward(self, x):
            return self.output

    assert relative_error(chosen.task, Given(sample.targets), sample) == 0
    assert relative_error(chosen.task, Given(sample.inputs), sample) == pytest.approx(1.0)
    idle = replace(chosen.task, aligned_share=1.0)
    sample = idle.sample(torch.Generator().manual_seed(0), 11)
    assert relative_error(idle, Given(torch.zeros_like(sample.inputs)), sample) == pytest.approx(1)


def test_where_the_sink_should_be():
    for names, place in ((("nop",), 0), (("nop", "fast", "register"), 0), (("registers",), 0)):
        task = experiment(*names).task
        sample = task.sample(torch.Generator().manual_seed(0), 5)
        assert task.sink(sample).tolist() == [place] * 5
        kinds = [layout_of(task)(sample.inputs).kind(0, token) for token in range(2)]
        assert kinds == ["register" if task.num_registers else "special", "text"]
    for mitigation, shift in (("none", 0), ("register", 1)):
        task = experiment("broadcast", "deep", mitigation).task
        sample = task.sample(torch.Generator().manual_seed(0), 5)
        assert task.sink(sample).tolist() == (sample.marks + shift).tolist()


def test_edits_change_the_sinks_value_and_nothing_else():
    chosen = short("broadcast", steps=200)
    one = run(chosen, 0)
    task, sink = one.experiment.task, one.sample.marks
    before = one.error
    assert error_after(task, one.model, one.sample, sink, 0, "zero") > 0.5 > 10 * before
    assert error_after(task, one.model, one.sample, sink, 0, "ordinary") > 0.5
    other = (sink + 3) % task.length
    assert error_after(task, one.model, one.sample, other, 0, "zero") < 0.1
    assert relative_error(task, one.model, one.sample) == before, "no hook is left"


def test_the_sweep():
    found = sweep_experiments()
    assert len(found) == 13 and len({one.mitigation for one in found}) == 13
    by = {one.mitigation: one for one in found}
    assert by["threshold 10, gamma 0"].right(["none"], [1.0])
    assert by["threshold 0, gamma 1"].expected == "no sink"
    assert not by["threshold -1, gamma 0"].right(["nop"], [1.0])
    assert not by["threshold -0.7, gamma 0"].right(["broadcast"], [1.0])
    assert not by["threshold 0, gamma 0"].right(["broadcast"], [1.0])
    assert by["threshold 0, gamma 0"].right(["nop"], [1.0])
    assert not by["threshold 0, gamma 0"].right(["none"], [1.0])


def test_a_kept_model_of_other_training_code_is_trained_again(tmp_path, monkeypatch):
    from sinkwise.experiments import kept
    from sinkwise.scanning.fingerprint import own_code

    assert own_code("synthetic") != own_code("nn") != own_code()
    run(short("nop"), 1, keep=tmp_path)
    monkeypatch.setattr(kept, "own_code", lambda *packages: "another")
    steps = []
    run(short("nop"), 1, lambda step, loss: steps.append(loss), keep=tmp_path)
    assert not any(math.isnan(loss) for loss in steps)


def test_a_kept_model_is_not_trained_again(tmp_path):
    chosen, steps = short("nop", mitigation="gate"), []
    one = run(chosen, 1, keep=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["nop-fast-gate-1.safetensors"]

    def count(step, loss):
        steps.append(loss)

    two = run(chosen, 1, count, keep=tmp_path)
    assert len(steps) == 40 and all(math.isnan(loss) for loss in steps)
    assert two.losses == one.losses and two.rows.equals(one.rows)
    assert not two.model.training
    other = short("nop", mitigation="gate", steps=41)
    assert run(other, 1, keep=tmp_path).losses != one.losses, "another task is trained anew"
    (tmp_path / "nop-fast-gate-1.safetensors").write_bytes(b"broken")
    assert run(chosen, 1, keep=tmp_path).rows.equals(one.rows)
    assert run(chosen, 2, keep=tmp_path).seed == 2 and len(list(tmp_path.iterdir())) == 2
