"""Tables of synthetic experiments: a row a layer, means and ranges over seeds."""

import math
from collections.abc import Sequence

import polars as pl

from sinkwise.experiments.running import Trained

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
"""The numbers of a table and their headings; `others` are the queries that have something to do."""

HEADINGS = ("experiment", "layer", *COLUMNS.values(), "verdicts", "right")


def summary_rows(runs: Sequence[Trained]) -> list[list[str]]:
    """One row a layer of one experiment: mean (least to greatest) over its seeds."""
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
                *[spread(group[column].to_list()) for column in COLUMNS],
                verdicts,
                f"{right}/{len(runs)}" if layer == 0 else "",
            ]
        )
    return lines


def spread(values: Sequence[float]) -> str:
    """Mean and, over several values, their range; a dash where there are none."""
    values = [value for value in values if not math.isnan(value)]
    if not values:
        return "-"
    mean = short(sum(values) / len(values))
    if len(values) == 1:
        return mean
    low, high = short(min(values)), short(max(values))
    return mean if low == high == mean else f"{mean} ({low} to {high})"


def short(value: float) -> str:
    """A number in few digits."""
    if value == 0 or abs(value) >= 0.001:
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return f"{value:.0e}"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is the heading."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines) + "\n"
