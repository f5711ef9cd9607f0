"""Which mitigation fits which mechanism, and what it costs: the tables of docs/mitigations.md.

    OMP_NUM_THREADS=1 python bench/mitigation_table.py OUT [--parts synthetic,vit,costs] [--write]

Trains every model that is not yet in OUT/models and prints Markdown tables: minimal models on the
synthetic tasks (three seeds; two minutes on one core), small ViTs on scanned digits (three seeds;
eighteen minutes), and the cost of a training step (half a minute). An interrupted run resumes.
`--write` updates the tables in docs/mitigations.md.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mitigation_costs
import mitigation_synthetic
import small_vit
import timm
import torch
import vit_evaluation
from common import write_table
from torch import Tensor, nn

from sinkwise.reports.synthetic_table import markdown

DOCS = Path(__file__).parent.parent / "docs" / "mitigations.md"
Table = list[Sequence[str]]
"""A row of headings, then rows that begin with a mitigation."""

SUMMARY = (
    ("NOP task: NOP queries at the null token", "nop", "attention to it, NOP queries"),
    ("verdicts", "nop", "verdicts"),
    ("broadcast task: attention to the hub", "broadcast", "attention to the hub"),
    ("verdicts", "broadcast", "verdicts of the layers that write"),
    ("ViT, board: heads with a sink", "board", "heads with a sink, rule mean"),
    ("idle patches at CLS and registers", "queries", "dim patches: to CLS and registers"),
    ("ViT, canvas: heads with a sink", "canvas", "heads with a sink, rule mean"),
    ("parameters, ViT-S/16", "vit-s", "parameters"),
    ("FLOPs", "vit-s", "FLOPs of a step"),
    ("time", "vit-s", "time of a step"),
)
"""Columns of the summary: heading, source table, and heading there. Of several rows with the same
mitigation it shows the first: the NOP task with a null token, the broadcast that is not local."""


def synthetic_tables(options: argparse.Namespace) -> dict[str, Table]:
    """The tables of the synthetic tasks."""
    names = [name for name in options.mitigations if name in mitigation_synthetic.NAMES]
    checkpoints = options.out / "models"
    nop = mitigation_synthetic.nop_rows(names, options.synthetic_seeds, checkpoints)
    broadcast = mitigation_synthetic.broadcast_rows(names, options.synthetic_seeds, checkpoints)
    return {
        "nop": [mitigation_synthetic.NOP_HEADINGS, *nop],
        "broadcast": [mitigation_synthetic.BROADCAST_HEADINGS, *broadcast],
    }


def vit_tables(options: argparse.Namespace) -> dict[str, Table]:
    """The tables of the small ViTs."""
    tables: dict[str, Table] = {}
    for task, recipe in small_vit.RECIPES.items():
        steps = options.vit_steps or recipe.steps
        evaluations = {
            name: vit_evaluation.evaluate(
                replace(recipe, mitigation=name, steps=steps),
                options.vit_seeds,
                options.out / "models",
            )
            for name in options.mitigations
        }
        rows = [vit_evaluation.row(name, runs) for name, runs in evaluations.items()]
        tables[task] = [vit_evaluation.HEADINGS, *rows]
        if task == "board":
            rows = [vit_evaluation.board_row(name, runs) for name, runs in evaluations.items()]
            tables["queries"] = [vit_evaluation.BOARD_HEADINGS, *rows]
    return tables


def cost_tables(options: argparse.Namespace) -> dict[str, Table]:
    """Parameters, FLOPs and time of the small ViT and of ViT-S/16."""
    recipe = small_vit.RECIPES["canvas"]
    small = {
        name: small_vit.build(replace(recipe, mitigation=name)) for name in options.mitigations
    }
    generator = torch.Generator().manual_seed(0)
    images = small_vit.draw(recipe, recipe.batch, generator, train=True)
    steps = {
        name: lambda model=model: small_vit.loss(recipe, model, images)
        for name, model in small.items()
    }
    tables = {"small": _costs(small, steps, options.rounds)}
    if options.large:
        pixels = torch.randn(2, 3, 224, 224, generator=generator)
        large = {name: vit_small(name) for name in options.mitigations}
        steps = {name: _training_loss(model, pixels) for name, model in large.items()}
        tables["vit-s"] = _costs(large, steps, options.rounds)
    return tables


def vit_small(mitigation: str) -> nn.Module:
    """An untrained ViT-S/16 with one of the mitigations."""
    torch.manual_seed(0)
    model = timm.create_model("vit_small_patch16_224", pretrained=False)
    small_vit.add_mitigation(model, mitigation, 0)
    return model


def _training_loss(model: nn.Module, pixels: Tensor) -> Callable[[], Tensor]:
    return lambda: model(pixels).square().mean() + small_vit.penalty(model)


def _costs(models: dict[str, Any], steps: dict[str, Any], rounds: int) -> Table:
    return [mitigation_costs.HEADINGS, *mitigation_costs.costs(models, steps, rounds)]


def summary(tables: dict[str, Table], names: Sequence[str]) -> Table:
    """The columns of SUMMARY from the other tables; a dash where a table has no such row."""
    rows: Table = [("mitigation", *(heading for heading, _, _ in SUMMARY))]
    for name in names:
        cells = []
        for _, table, heading in SUMMARY:
            first = next((row for row in tables[table][1:] if row[0] == name), None)
            cells.append("-" if first is None else first[tables[table][0].index(heading)])
        rows.append((name, *cells))
    return rows


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Table]]] = {
    "synthetic": synthetic_tables,
    "vit": vit_tables,
    "costs": cost_tables,
}


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder for the trained models")
    parser.add_argument("--parts", default=",".join(PARTS), help="from synthetic, vit, costs")
    parser.add_argument("--mitigations", default=",".join(small_vit.MITIGATIONS))
    parser.add_argument("--synthetic-seeds", type=int, default=3)
    parser.add_argument("--vit-seeds", type=int, default=3)
    parser.add_argument("--vit-steps", type=int, help="replaces each task's own number")
    parser.add_argument("--rounds", type=int, default=9, help="timing rounds")
    parser.add_argument("--no-large", dest="large", action="store_false", help="leave out ViT-S/16")
    parser.add_argument("--write", action="store_true", help="update docs/mitigations.md")
    options = parser.parse_args(arguments)
    options.parts = options.parts.split(",")
    options.mitigations = options.mitigations.split(",")
    for option, given, known in (
        ("--parts", options.parts, PARTS),
        ("--mitigations", options.mitigations, small_vit.MITIGATIONS),
    ):
        for name in given:
            if name not in known:
                parser.error(f"{option} must be from {', '.join(known)}; got {name!r}")
    if options.mitigations[0] != "none":
        parser.error(
            "--mitigations must begin with 'none', the baseline of the others; got "
            f"{options.mitigations[0]!r}"
        )
    return options


def main(arguments: Sequence[str] | None = None) -> dict[str, str]:
    """Print the tables and return them by name."""
    options = options_of(arguments)
    torch.set_num_threads(1)
    (options.out / "models").mkdir(parents=True, exist_ok=True)
    tables: dict[str, Table] = {}
    for part in options.parts:
        for name, table in PARTS[part](options).items():
            tables[name] = table
            _show(name, table, options.write)
    if {table for _, table, _ in SUMMARY} <= set(tables):
        tables["summary"] = summary(tables, options.mitigations)
        _show("summary", tables["summary"], options.write)
    return {name: markdown(table) for name, table in tables.items()}


def _show(name: str, table: Table, write: bool) -> None:
    print(f"{name}\n\n{markdown(table)}", flush=True)
    if write:
        write_table(name, [markdown(table).rstrip("\n")], DOCS)


if __name__ == "__main__":
    main()
