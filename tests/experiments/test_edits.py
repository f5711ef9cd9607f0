"""Interventions on a sink's value."""

from sinkwise.experiments.edits import error_after
from sinkwise.experiments.evaluation import relative_error
from sinkwise.experiments.experiment_run import run_experiment
from tests.experiments import shortened


def test_edits_change_the_sinks_value_and_nothing_else():
    chosen = shortened("broadcast", steps=200)
    one = run_experiment(chosen, 0)
    task, sink = one.experiment.task, one.batch.marks
    before = one.error
    assert error_after(task, one.model, one.batch, sink, 0, "zero") > 0.5 > 10 * before
    assert error_after(task, one.model, one.batch, sink, 0, "ordinary") > 0.5
    other = (sink + 3) % task.length
    assert error_after(task, one.model, one.batch, other, 0, "zero") < 0.1
    assert relative_error(task, one.model, one.batch) == before, "no hook is left"
