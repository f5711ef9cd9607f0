"""The synthetic tasks with each mitigation: which sinks remain, over seeds."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sinkwise.experiments.experiment_run import ExperimentRun, run_experiment
from sinkwise.reports.synthetic_table import mean_and_range
from sinkwise.synthetic.forms import IDLE_SHARE, experiment

NAMES = {
    "none": "none",
    "elementwise gate": "gate",
    "headwise gate": "headwise-gate",
    "registers": "register",
    "gate + registers": "both",
    "sink logit": "sink-logit",
    "softmax-one": "softmax-one",
    "global pathway": "global-pathway",
}
"""Rows of the tables, and the experiments' names for them. Experiments with registers have one."""

NOP_FORMS = {"fast": "with a null token", "no-null": "without one"}
"""Forms of the NOP task, and their descriptions in the table."""

LOCAL = {"registers": "none", "gate + registers": "gate"}
"""Rows that also have a local broadcast, which must go through the register, and its mitigation."""

NOP_HEADINGS = (
    "mitigation", "task", "error", "attention to it, NOP queries", "others", "to no token, NOP",
    "others", "largest column", "value ratio", "gate, NOP queries", "others", "verdicts",
    "expected",
)  # fmt: skip
BROADCAST_HEADINGS = (
    "mitigation", "task", "error", "attention to the hub", "to no token", "value ratio",
    "pathway's share of the updates", "verdicts of the layers that write", "expected",
)  # fmt: skip


def nop_rows(names: Iterable[str], seeds: int, checkpoints: Path) -> list[list[str]]:
    """One row per mitigation and form: means (minimum to maximum) over the seeds."""
    rows = []
    for name in names:
        for form, words in NOP_FORMS.items():
            runs = [
                run_experiment(experiment("nop", form, NAMES[name]), seed, checkpoints=checkpoints)
                for seed in range(seeds)
            ]
            rows.append([name, words, *nop_cells(runs), _counts(runs), _right(runs)])
    return rows


def nop_cells(runs: list[ExperimentRun]) -> list[str]:
    """The numbers of a NOP row.

    Without a null token or register, position 0 is an ordinary token and has no numbers.
    """
    columns: dict[str, list[float]] = {}
    for one in runs:
        task = one.experiment.task
        values = one.rows.to_dicts()[0]
        sink_logit = one.after[0].sink_logit_share[:, task.num_registers :]
        idle = task.idle(one.batch)
        active = ~idle
        active[:, : task.num_unscored] = False
        special = bool(task.num_unscored or task.num_registers)
        numbers = {
            "error": values["error"],
            "nop": values["mass_nop"] if special else float("nan"),
            "others": values["mass_active"] if special else float("nan"),
            "sink logit, nop": _share(sink_logit[idle]),
            "sink logit, others": _share(sink_logit[active]),
            "largest": values["largest"],
            "ratio": values["value_ratio"] if special else float("nan"),
            "gate, nop": values["gate_nop"],
            "gate, others": values["gate_active"],
        }
        for key, number in numbers.items():
            columns.setdefault(key, []).append(number)
    return [mean_and_range(numbers) for numbers in columns.values()]


def broadcast_rows(names: Iterable[str], seeds: int, checkpoints: Path) -> list[list[str]]:
    """One row per mitigation: means (minimum to maximum) for the layer with the largest updates."""
    rows = []
    for name in names:
        forms = [("broadcast", "deep", NAMES[name], "each token sees all")]
        if name in LOCAL:
            forms.append(("registers", "local", LOCAL[name], "through the register alone"))
        for kind, form, mitigation, words in forms:
            runs = [
                run_experiment(experiment(kind, form, mitigation), seed, checkpoints=checkpoints)
                for seed in range(seeds)
            ]
            rows.append([name, words, *broadcast_cells(runs), _counts(runs), _right(runs)])
    return rows


def broadcast_cells(runs: list[ExperimentRun]) -> list[str]:
    """The numbers of a broadcast row."""
    columns: dict[str, list[float]] = {}
    for one in runs:
        layer = max(one.rows.to_dicts(), key=lambda row: row["update_share"])
        numbers = {
            "error": layer["error"],
            "mass": layer["mass"],
            "sink logit": _share(one.after[layer["layer"]].sink_logit_share),
            "ratio": layer["value_ratio"],
            "pathway": pathway_share(one.model, one.batch.inputs),
        }
        for key, number in numbers.items():
            columns.setdefault(key, []).append(number)
    return [mean_and_range(numbers) for numbers in columns.values()]


@torch.no_grad()
def pathway_share(model: nn.Module, inputs: torch.Tensor) -> float:
    """Squared updates of the global pathways over those of pathways and attention together.

    NaN without a pathway.
    """
    squares = {"pathway": 0.0, "attention": 0.0}
    handles = []

    def add_to(kind: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], out: torch.Tensor) -> None:
            squares[kind] += float(out.double().square().sum())

        return hook

    for name, module in model.named_modules():
        kind = name.rpartition(".")[2]
        if kind in squares:
            handles.append(module.register_forward_hook(add_to(kind)))
    try:
        model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    total = sum(squares.values())
    return squares["pathway"] / total if squares["pathway"] else float("nan")


def _share(values: torch.Tensor) -> float:
    """The mean of the values, or NaN if it is a rounding error."""
    mean = float(values.mean())
    return mean if mean > 1e-6 else float("nan")


def _counts(runs: list[ExperimentRun]) -> str:
    """The verdicts of the layers that are not idle, with their counts."""
    seen: dict[str, int] = {}
    for one in runs:
        for verdict, share in zip(one.verdicts, one.rows["update_share"], strict=True):
            if share >= IDLE_SHARE:
                seen[verdict] = seen.get(verdict, 0) + 1
    return ", ".join(f"{name} {count}" for name, count in sorted(seen.items()))


def _right(runs: list[ExperimentRun]) -> str:
    return f"{runs[0].experiment.expected}: {sum(one.right for one in runs)}/{len(runs)}"
