"""The numbers of one trained model, against plain loops and closed forms."""

import math
from dataclasses import replace

import pytest
import torch

from sinkwise.experiments.evaluation import relative_error, token_layout
from sinkwise.experiments.experiment_run import run_experiment
from sinkwise.synthetic.forms import experiment
from tests.experiments import shortened


def test_numbers_of_a_damping_row():
    one = run_experiment(shortened("nop", mitigation="gate"), 0)
    found, row = one.after[0], one.rows.to_dicts()[0]
    nop = one.batch.marks
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
    chosen = shortened("nop")
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
        kinds = [token_layout(task)(sample.inputs).kind(0, token) for token in range(2)]
        assert kinds == ["register" if task.num_registers else "special", "text"]
    for mitigation, shift in (("none", 0), ("register", 1)):
        task = experiment("broadcast", "deep", mitigation).task
        sample = task.sample(torch.Generator().manual_seed(0), 5)
        assert task.sink(sample).tolist() == (sample.marks + shift).tolist()
