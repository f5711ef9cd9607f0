"""Tables of synthetic experiments: one row per layer, means and ranges over seeds."""

import math
from collections.abc import Sequence

import polars as pl

from sinkwise.experiments.experiment_run import ExperimentRun

COLUMNS = {
    "error": "error",
    "mass_nop": "attention, NOP queries",
    "mass_active": "others",
    "largest": "largest column",
    "value_ratio": "value ratio",
    "stable_rank": "stable rank",
    "spectral_gap": "σ1/σ2",
    "update_share": "share of updates",
    "gate_nop": "gate, NOP queries",
    "gate_active": "others",
}
"""The numbers of a table and their headings."""

HEADINGS = ("experiment", "layer", *COLUMNS.values(), "verdicts", "right")

RANGES = "Means over the seeds, with the minimum and maximum in parentheses."

COLUMN_NOTES = (
    "The error is the squared error relative to the squared update that the task requires. "
    "“Attention” is that to the expected sink: of the NOP queries, which need no update, and of "
    "the others. “Largest column” is what the most attended token receives. σ1/σ2 is the ratio of "
    "the two largest singular values of W_Q W_Kᵀ. “Share of updates” is a layer's share of all "
    "squared updates. “Right” counts the seeds whose verdicts are as expected."
)
"""The columns of a table, for the pages that show one."""


def summary_rows(runs: Sequence[ExperimentRun]) -> list[list[str]]:
    """One row per layer of one experiment: mean (minimum to maximum) over its seeds."""
    first = runs[0]
    rows = pl.concat([run.rows for run in runs])
    right = sum(run.right for run in runs)
    name = f"{first.experiment.kind}, {first.experiment.form}, {first.experiment.mitigation}"
    lines = []
    for (layer,), group in rows.group_by("layer", maintain_order=True):
        counts = group["verdict"].value_counts(sort=True).rows()
        verdicts = ", ".join(
            verdict if count == len(group) else f"{verdict} {count}" for verdict, count in counts
        )
        lines.append(
            [
                name if layer == 0 else "",
                str(layer),
                *[mean_and_range(group[column].to_list()) for column in COLUMNS],
                verdicts,
                f"{right}/{len(runs)}" if layer == 0 else "",
            ]
        )
    return lines


def mean_and_range(values: Sequence[float]) -> str:
    """The mean of the values that are not NaN, and their range if they differ; else a dash."""
    values = [value for value in values if not math.isnan(value)]
    if not values:
        return "-"
    mean = format_number(sum(values) / len(values))
    if len(values) == 1:
        return mean
    low, high = format_number(min(values)), format_number(max(values))
    return mean if low == high == mean else f"{mean} ({low} to {high})"


def format_number(value: float) -> str:
    """A number with few digits."""
    if value == 0 or abs(value) >= 0.001:
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return f"{value:.0e}"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row holds the headings."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines) + "\n"
