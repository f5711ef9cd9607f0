"""The `sinkwise` command."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sinkwise.errors import InputError, SinkwiseError

if TYPE_CHECKING:
    from sinkwise.results import Scan

DEFAULT_LENGTH = 1024
"""Tokens of a text sample, where the model has as many positions."""

app = typer.Typer(
    help="Find attention sinks, tell which mechanism each is, and what answers it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _root() -> None:
    """Find attention sinks, tell which mechanism each is, and what answers it."""


@app.command()
def diagnose(
    model: Annotated[
        str,
        typer.Argument(help="hf:NAME, timm:NAME, pypi:NAME or a local folder."),
    ],
    text: Annotated[Path | None, typer.Option(help="A UTF-8 text file to read.")] = None,
    images: Annotated[Path | None, typer.Option(help="A folder of pictures to look at.")] = None,
    length: Annotated[
        int | None,
        typer.Option(help="Tokens of a text sample; default: 1024, or all the model has."),
    ] = None,
    size: Annotated[
        int | None, typer.Option(help="Pixels of a picture's side; default: the model's own.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Text windows or pictures, at most.")] = 16,
    batch_size: Annotated[int, typer.Option(help="Samples run at once.")] = 4,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")] = "cpu",
    rule: Annotated[str, typer.Option(help="auto, mean, relaxed or literal.")] = "auto",
    out: Annotated[Path, typer.Option(help="Directory to save the scan in.")] = Path("scan"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables.")
    ] = False,
) -> None:
    """Which attention sinks MODEL has, which mechanism each one is, and what to do about it."""
    with _mistakes():
        from sinkwise.data.images import images as image_inputs
        from sinkwise.data.text import text as text_inputs
        from sinkwise.hosts.inputs import position_limit
        from sinkwise.hosts.load import load
        from sinkwise.results import check_target
        from sinkwise.rules import Rules
        from sinkwise.scanning import scan

        if (text is None) == (images is None):
            raise InputError("give either --text FILE or --images DIR")
        if images is not None and length is not None:
            raise InputError("--length is for --text; pictures have --size")
        if text is not None and size is not None:
            raise InputError("--size is for --images; texts have --length")
        rules = Rules.named(rule)
        check_target(out)
        inputs: Any
        if text is not None:
            inputs = text_inputs(
                text, length=length or DEFAULT_LENGTH, samples=samples, batch_size=batch_size
            )
        elif images is not None:
            inputs = image_inputs(images, samples=samples, batch_size=batch_size, size=size)
        module = load(model, dtype=dtype, device=device)
        if text is not None and length is None:
            longest = position_limit(module) or DEFAULT_LENGTH
            inputs = replace(inputs, length=min(DEFAULT_LENGTH, longest))
        with _progress("measuring", samples, quiet=as_json) as update:
            result = scan(module, inputs, rules=rules, progress=update)
        _publish(result, out, as_json)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Directory to save the scans in.")] = Path(
        "sinkwise-demo"
    ),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a model instead of tables.")
    ] = False,
) -> None:
    """Diagnose two small trained models that ship with sinkwise: one of each mechanism."""
    with _mistakes():
        from sinkwise.demo import run_demo

        for result, words in run_demo(out):
            if not as_json:
                typer.echo(words)
            _publish(result, out / result.meta["model"].removeprefix("demo:"), as_json)


def main() -> None:
    """Entry point of the command."""
    app()


@contextmanager
def _mistakes() -> Iterator[None]:
    """A user's mistake is one line on stderr and exit code 2, never a traceback."""
    try:
        yield
    except SinkwiseError as error:
        typer.echo("sinkwise: " + " ".join(str(error).split()), err=True)
        raise typer.Exit(2) from None


@contextmanager
def _progress(what: str, total: int, quiet: bool) -> Iterator[Any]:
    """A progress bar on stderr; silent for machines."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def _publish(result: "Scan", out: Path, as_json: bool) -> None:
    """Save a scan with its figure, and print it."""
    from sinkwise.files import write_bytes
    from sinkwise.reports.heads_figure import heads_figure, png
    from sinkwise.reports.table import layer_rows, layer_table

    result.save(out)
    write_bytes(out / "heads.png", png(heads_figure(result)))
    verdict = result.verdict()
    if as_json:
        summary = {
            **result.meta,
            "prescription": verdict.prescription,
            "advice": verdict.advice,
            "evidence": list(verdict.evidence),
            "layers": layer_rows(result).to_dicts(),
            "out": str(out),
        }
        typer.echo(json.dumps(summary, ensure_ascii=False))
        return
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(layer_table(result))
    console.print(f"\n[bold]Prescription: {verdict.prescription}.[/bold] {verdict.advice}")
    for line in verdict.evidence:
        console.print(f"- {line}", highlight=False)
    rules = result.meta["rules"]
    console.print(
        f"\nEvent rules: {_rule(rules['causal'])} (causal), {_rule(rules['bidirectional'])} "
        f"(both ways). Mechanism: {_rule(rules['mechanism'])}.\nSaved in {out}/",
        highlight=False,
        markup=False,
    )


def _rule(rule: dict[str, Any]) -> str:
    name = rule.get("name")
    numbers = ", ".join(f"{key}={value}" for key, value in rule.items() if key != "name")
    return f"{name}({numbers})" if name else numbers
