"""The signatures that theory predicts, over five seeds of every fast experiment.

The authors' forms take minutes per seed (`sinkwise synthetic nop --form causal`, for example; their
results are in docs/synthetic.md). Here one seed of the causal form is trained for 300 steps.
"""

from dataclasses import replace

import pytest

from sinkwise.experiments.cross import CROSS
from sinkwise.experiments.experiment_run import run_experiment
from sinkwise.synthetic.forms import experiment

SEEDS = range(5)
SLOW = [names for names in CROSS if names[0] == "registers"]
FAST = [names for names in CROSS if names[0] != "registers"]


def each(*names, seeds=SEEDS):
    """The run of each seed; the scan's verdicts must be as expected."""
    chosen = experiment(*names)
    for seed in seeds:
        one = run_experiment(chosen, seed)
        assert one.right, (names, seed, one.verdicts, one.rows)
        yield one, one.rows.to_dicts()


def check_nop(mitigation, row):
    uniform = row["uniform"]
    if mitigation == "control":
        assert row["error"] < 1e-3 and row["spectral_gap"] < 3
        assert row["largest"] < 1.2 * uniform
        return
    assert row["error"] < 1e-3, "the task is solved"
    assert row["value_ratio"] <= 0.05
    if mitigation in ("none", "register", "strong-null-gate"):
        assert row["mass_nop"] >= 0.95 and row["mass_active"] <= 0.05
        assert row["spectral_gap"] > 5
    else:
        assert row["largest"] < 1.5 * uniform and row["mass_nop"] < 3 * uniform
        assert row["gate_nop"] < 0.05 and row["gate_active"] > 0.95
    if mitigation == "both":
        assert row["mass_nop"] == pytest.approx(uniform, rel=0.1)
    if mitigation == "strong-null-gate":
        assert 0.05 < row["gate_nop"] < 0.5, "the null token and the gate share the work"


def check_hub(rows):
    hub, other = sorted(rows, key=lambda row: -row["update_share"])
    assert hub["error"] < 0.01
    assert hub["mass"] >= 0.95 and hub["value_ratio"] >= 0.6 and hub["stable_rank"] <= 1.1
    assert hub["column_share"] == 1.0
    assert other["update"] < 0.05 * hub["update"]
    assert hub["similarity_after"] > hub["similarity_before"] + 0.2
    assert abs(other["similarity_after"] - other["similarity_before"]) < 0.05


@pytest.mark.parametrize("names", FAST, ids="-".join)
def test_fast(names):
    kind, form, mitigation = names
    for _, rows in each(*names):
        if kind == "nop":
            check_nop(mitigation, rows[0])
        elif form == "plain":
            assert min(row["update_share"] for row in rows) > 0.2, "the layers share the work"
            assert all(row["value_ratio"] >= 0.6 and row["mass"] >= 0.95 for row in rows)
        else:
            check_hub(rows)
            assert mitigation != "gate" or max(row["gate_active"] for row in rows) > 0.5


@pytest.mark.parametrize("names", SLOW, ids="-".join)
def test_one_register_does_both(names):
    for _, (first, second) in each(*names):
        assert first["error"] < 0.1
        assert first["register_to_source"] > 0.95, "the register collects the payload"
        assert first["mass"] > 0.9 and first["update_share"] < 0.05
        assert second["mass"] > 0.95 and second["value_ratio"] >= 0.5
        assert second["stable_rank"] <= 1.1
        if names[2] == "none":
            assert first["value_ratio"] <= 0.2
        else:
            assert first["gate_active"] < 0.2 and second["gate_active"] > 0.9


NO_NULL = ("none", "gate", "headwise-gate", "register", "both", "sink-logit", "softmax-one")


@pytest.mark.parametrize("mitigation", [*NO_NULL, "global-pathway"])
def test_damping_without_a_null_token(mitigation):
    for one, (row,) in each("nop", "no-null", mitigation, seeds=range(2)):
        idle = one.experiment.task.idle(one.batch)
        sink_logit = one.after[0].sink_logit_share[:, one.experiment.task.num_registers :]
        if mitigation == "none":
            assert row["error"] > 0.1, "a head alone cannot attend to nothing"
            continue
        assert row["error"] < 2e-3
        if mitigation in ("register", "both"):
            assert row["mass_nop"] > 0.95 and row["value_ratio"] < 0.1
        else:
            assert row["largest"] < 1.5 * row["uniform"]
        if mitigation in ("sink-logit", "softmax-one"):
            assert sink_logit[idle].mean() > 0.98 and sink_logit[~idle].mean() < 0.02
        else:
            assert sink_logit.abs().max() < 1e-9


@pytest.mark.parametrize("mitigation", ["sink-logit", "softmax-one", "global-pathway"])
def test_other_mitigations_leave_the_broadcast(mitigation):
    for one, rows in each("broadcast", "deep", mitigation, seeds=range(2)):
        check_hub(rows)
        assert one.after[0].sink_logit_share.mean() < 0.01, (
            "a sink logit takes nothing from a broadcast"
        )


def test_the_authors_causal_form_begins_to_sink():
    chosen = experiment("nop", "causal")
    chosen = replace(chosen, task=replace(chosen.task, steps=300))
    one = run_experiment(chosen, 0)
    row = one.rows.to_dicts()[0]
    assert row["mass_nop"] > 0.8 and row["mass_active"] < 0.2 and row["value_ratio"] < 0.2
    assert one.right
