"""`sinkwise synthetic`: train minimal models, show their signatures, check the verdict."""

import json
import sys
from collections.abc import Callable
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sinkwise.cli.common import make_folder, progress_bar, user_errors
from sinkwise.errors import InputError

if TYPE_CHECKING:
    from sinkwise.experiments.experiment_run import ExperimentRun
    from sinkwise.synthetic.forms import Experiment

app = typer.Typer(
    help="Train minimal models that need one of the mechanisms, and show its signature.",
    no_args_is_help=True,
)

Form = Annotated[str | None, typer.Option(help="Default: the first one named above.")]
Mitigation = Annotated[str, typer.Option(help="What is added to the model.")]
Seeds = Annotated[int, typer.Option(help="Number of seeds, counted from 0.")]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Folder for page.html, charts, numbers and models; a second run resumes there."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


KINDS = {
    "nop": """Conditional damping: a head that must sometimes do nothing grows a NOP sink.

    Forms: fast and no-null (seconds), causal and sweep (the authors': a minute per seed).
    Mitigations: none, gate, headwise-gate, register, both, sink-logit, softmax-one,
    global-pathway, strong-null-gate, control.
    """,
    "broadcast": """Global broadcast: every token needs one token's payload, and a layer sends it.

    Forms: deep, concave, plain (seconds), authors (minutes per seed). Mitigations: none, gate,
    headwise-gate, register, both, sink-logit, softmax-one, global-pathway.
    """,
    "registers": """Local attention and one register: a NOP in one layer, a broadcast in the next.

    Form: local. Mitigations: none, gate, headwise-gate.
    """,
}
"""The kinds of experiment, each a command, with its help."""


def _add(kind: str, words: str) -> None:
    @app.command(kind, help=cleandoc(words))
    def command(
        form: Form = None,
        mitigation: Mitigation = "none",
        seeds: Seeds = 5,
        out: Out = None,
        as_json: AsJson = False,
    ) -> None:
        _one(kind, form, mitigation, seeds, out, as_json)


for _kind, _words in KINDS.items():
    _add(_kind, _words)


@app.command()
def cross(seeds: Seeds = 5, out: Out = None, as_json: AsJson = False) -> None:
    """Every mechanism with every mitigation, in one table (mean and range over seeds)."""
    with user_errors():
        from sinkwise.experiments.cross import cross_experiments
        from sinkwise.reports.cross_page import cross_charts, cross_page

        _all(cross_experiments(), seeds, out, as_json, cross_charts, cross_page)


@app.command()
def sweep(seeds: Seeds = 1, out: Out = None, as_json: AsJson = False) -> None:
    """The authors' sweep: attention to the sink against the share of NOP queries, and gamma.

    Thirteen runs per seed, about five minutes on one quiet core.
    """
    with user_errors():
        from sinkwise.experiments.cross import sweep_experiments
        from sinkwise.reports.sweep_page import sweep_charts, sweep_page

        _all(sweep_experiments(), seeds, out, as_json, sweep_charts, sweep_page)


@app.command()
def logit(
    out: Annotated[Path | None, typer.Option(help="Folder for logit.png.")] = None,
    as_json: AsJson = False,
) -> None:
    """A sink logit on one screen: the attention it takes, and the norm of the head's output."""
    with user_errors():
        from sinkwise.reports.charts import png
        from sinkwise.reports.logit_figure import logit_curve, logit_figure
        from sinkwise.storage.files import write_bytes
        from sinkwise.synthetic.logit import sink_logit_point

        points = [sink_logit_point(None), *logit_curve(range(-2, 7))]
        if out is not None:
            make_folder(out)
            write_bytes(out / "logit.png", png(logit_figure()))
        if as_json:
            typer.echo(json.dumps([vars(point) for point in points]))
            return
        typer.echo(
            "A query that matches none of six tokens. A sink logit adds to the softmax's "
            "denominator\nand has no value, so the head can write almost nothing.\n\n"
            "sink logit   weights sum to   the sink takes   norm of the output"
        )
        for point in points:
            word = "none" if point.sink_logit is None else f"{point.sink_logit:g}"
            typer.echo(
                f"{word:>10}   {point.weight_sum:>14.2f}   {point.sink_share:>14.0%}   "
                f"{point.output_norm:>11.2f} {'#' * round(30 * point.output_norm)}"
            )
        if out is not None:
            typer.echo(f"\nSaved in {out}/")


def _one(
    kind: str, form: str | None, mitigation: str, seeds: int, out: Path | None, as_json: bool
) -> None:
    with user_errors():
        from sinkwise.reports.synthetic_page import synthetic_charts, synthetic_page
        from sinkwise.synthetic.forms import experiment

        chosen = experiment(kind, form, mitigation)
        _all(
            [chosen],
            seeds,
            out,
            as_json,
            lambda groups: synthetic_charts(groups[0]),
            lambda groups, found: synthetic_page(groups[0], found),
        )


def _all(
    chosen: "list[Experiment]",
    seeds: int,
    out: Path | None,
    as_json: bool,
    charts: Callable[[Any], dict[str, Any]],
    page: Callable[[Any, dict[str, Any]], Any],
) -> None:
    """Run experiments over seeds, print and save the results. Exit code 1 on a wrong verdict."""
    from sinkwise.experiments.experiment_run import run_experiment

    if seeds < 1:
        raise InputError(f"--seeds must be at least 1; got {seeds}")
    models = None
    if out is not None:
        make_folder(out)
        models = out / "models"
        make_folder(models)
    total = seeds * sum(one.task.steps for one in chosen)
    groups: list[list[ExperimentRun]] = []
    done = 0
    with progress_bar("training", total, as_json) as update:

        def step(_step: int, _loss: float) -> None:
            nonlocal done
            done += 1
            if update is not None:
                update(done)

        for one in chosen:
            groups.append([run_experiment(one, seed, step, models) for seed in range(seeds)])
    if out is not None:
        _save(groups, out, charts, page)
    if as_json:
        typer.echo(
            json.dumps({"experiments": _json(groups), "out": None if out is None else str(out)})
        )
    else:
        _print(groups, out)
    if not all(run.right for group in groups for run in group):
        raise typer.Exit(1)


def _save(
    groups: "list[list[ExperimentRun]]",
    out: Path,
    charts: Callable[[Any], dict[str, Any]],
    page: Callable[[Any, dict[str, Any]], Any],
) -> None:
    from sinkwise.reports.charts import png
    from sinkwise.reports.synthetic_table import HEADINGS, markdown, summary_rows
    from sinkwise.storage.files import write_bytes

    found = charts(groups)
    for name, chart in found.items():
        write_bytes(out / f"{name}.png", png(chart))
    rows = [row for group in groups for row in summary_rows(group)]
    write_bytes(out / "table.md", markdown([HEADINGS, *rows]).encode())
    write_bytes(out / "rows.json", json.dumps(_json(groups), indent=1).encode())
    page(groups, found).write(out / "page.html")


def _json(groups: "list[list[ExperimentRun]]") -> list[dict[str, Any]]:
    from dataclasses import asdict

    return [
        {
            "kind": group[0].experiment.kind,
            "form": group[0].experiment.form,
            "mitigation": group[0].experiment.mitigation,
            "task": {**asdict(group[0].experiment.task), "seed": None},
            "expected": group[0].experiment.expected,
            "seeds": [
                {
                    "seed": run.seed,
                    "right": run.right,
                    "prescription": run.scan.verdict().prescription,
                    # JSON has no NaN: undefined values are null.
                    "layers": run.rows.fill_nan(None).to_dicts(),
                    "losses": run.losses,
                }
                for run in group
            ],
        }
        for group in groups
    ]


def _print(groups: "list[list[ExperimentRun]]", out: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from sinkwise.reports.synthetic_table import HEADINGS, summary_rows

    console = Console(width=None if sys.stdout.isatty() else 200)
    table = Table(box=None, header_style="bold", padding=(0, 1))
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == HEADINGS[0] else "right")
    for group in groups:
        for row in summary_rows(group):
            table.add_row(*row)
    console.print(table)
    for group in groups:
        right = sum(run.right for run in group)
        one = group[0].experiment
        console.print(
            f"{one.kind}, {one.form}, {one.mitigation}: expected {one.expected}; "
            f"the scan says so in {right} of {len(group)} seeds.",
            highlight=False,
        )
    rule = groups[0][0].scan.meta["rules"]["bidirectional"]
    numbers = ", ".join(f"{key}={value}" for key, value in rule.items() if key != "name")
    console.print(f"\nEvent rule: {rule['name']}({numbers}).", highlight=False)
    if out is not None:
        console.print(f"Saved in {out}/", highlight=False)
