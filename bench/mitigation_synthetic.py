"""The synthetic tasks with each mitigation: what is left of either sink, over seeds."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sinkwise.experiments.running import Trained, run
from sinkwise.reports.synthetic_table import spread
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
"""Rows of the tables, and what the experiments call them. They have one register anyway."""

NOP_FORMS = {"fast": "with a null token", "no-null": "without one"}
"""Forms of the NOP task, and their words in the table."""

LOCAL = {"registers": "none", "gate + registers": "gate"}
"""Rows that also have a broadcast whose only way is through the register, and what is in it."""

NOP_HEADINGS = (
    "mitigation", "task", "error", "attention to it, NOP queries", "others", "to no token, NOP",
    "others", "largest column", "value ratio", "gate, NOP queries", "others", "verdicts",
    "expected",
)  # fmt: skip
BROADCAST_HEADINGS = (
    "mitigation", "task", "error", "attention to the hub", "to no token", "value ratio",
    "pathway's share of the updates", "verdicts of the layers that write", "expected",
)  # fmt: skip


def nop_rows(names: Iterable[str], seeds: int, keep: Path) -> list[list[str]]:
    """A row a mitigation and form: means (least to greatest) over the seeds."""
    rows = []
    for name in names:
        for form, words in NOP_FORMS.items():
            runs = [
                run(experiment("nop", form, NAMES[name]), seed, keep=keep) for seed in range(seeds)
            ]
            rows.append([name, words, *nop_cells(runs), _counts(runs), _right(runs)])
    return rows


def nop_cells(runs: list[Trained]) -> list[str]:
    """The numbers of a NOP row. Without a null token or register position 0 is an ordinary token,
    and nothing is said of it.
    """
    found: dict[str, list[float]] = {}
    for one in runs:
        task = one.experiment.task
        values = one.rows.to_dicts()[0]
        spared = one.after[0].spared[:, task.num_registers :]
        idle = task.idle(one.sample)
        active = ~idle
        active[:, : task.scored] = False
        special = bool(task.scored or task.num_registers)
        numbers = {
            "error": values["error"],
            "nop": values["mass_nop"] if special else float("nan"),
            "others": values["mass_active"] if special else float("nan"),
            "spared, nop": _share(spared[idle]),
            "spared, others": _share(spared[active]),
            "largest": values["largest"],
            "ratio": values["value_ratio"] if special else float("nan"),
            "gate, nop": values["gate_nop"],
            "gate, others": values["gate_active"],
        }
        for key, number in numbers.items():
            found.setdefault(key, []).append(number)
    return [spread(numbers) for numbers in found.values()]


def broadcast_rows(names: Iterable[str], seeds: int, keep: Path) -> list[list[str]]:
    """A row a mitigation: the layer that writes most, means (least to greatest) over the seeds."""
    rows = []
    for name in names:
        forms = [("broadcast", "deep", NAMES[name], "each token sees all")]
        if name in LOCAL:
            forms.append(("registers", "local", LOCAL[name], "through the register alone"))
        for kind, form, mitigation, words in forms:
            runs = [
                run(experiment(kind, form, mitigation), seed, keep=keep) for seed in range(seeds)
            ]
            rows.append([name, words, *broadcast_cells(runs), _counts(runs), _right(runs)])
    return rows


def broadcast_cells(runs: list[Trained]) -> list[str]:
    """The numbers of a broadcast row."""
    found: dict[str, list[float]] = {}
    for one in runs:
        layer = max(one.rows.to_dicts(), key=lambda row: row["update_share"])
        numbers = {
            "error": layer["error"],
            "mass": layer["mass"],
            "spared": _share(one.after[layer["layer"]].spared),
            "ratio": layer["value_ratio"],
            "pathway": pathway_share(one.model, one.sample.inputs),
        }
        for key, number in numbers.items():
            found.setdefault(key, []).append(number)
    return [spread(numbers) for numbers in found.values()]


@torch.no_grad()
def pathway_share(model: nn.Module, inputs: torch.Tensor) -> float:
    """Squared updates of the global pathways over those of pathways and attention together; NaN
    where there is no pathway.
    """
    squares = {"pathway": 0.0, "attention": 0.0}
    handles = []

    def note(kind: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], out: torch.Tensor) -> None:
            squares[kind] += float(out.double().square().sum())

        return hook

    for name, module in model.named_modules():
        kind = name.rpartition(".")[2]
        if kind in squares:
            handles.append(module.register_forward_hook(note(kind)))
    try:
        model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    total = sum(squares.values())
    return squares["pathway"] / total if squares["pathway"] else float("nan")


def _share(values: torch.Tensor) -> float:
    """Their mean, and NaN for what rounding alone has left."""
    mean = float(values.mean())
    return mean if mean > 1e-6 else float("nan")


def _counts(runs: list[Trained]) -> str:
    """The verdicts of the layers with at least 5 % of attention's updates, with their counts."""
    seen: dict[str, int] = {}
    for one in runs:
        for verdict, share in zip(one.verdicts, one.rows["update_share"], strict=True):
            if share >= IDLE_SHARE:
                seen[verdict] = seen.get(verdict, 0) + 1
    return ", ".join(f"{name} {count}" for name, count in sorted(seen.items()))


def _right(runs: list[Trained]) -> str:
    return f"{runs[0].experiment.expected}: {sum(one.right for one in runs)}/{len(runs)}"
