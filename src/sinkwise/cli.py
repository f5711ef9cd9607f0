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
    screen: Annotated[
        bool, typer.Option("--screen", help="Find candidates from a sample of the queries.")
    ] = False,
    devices: Annotated[int, typer.Option(help="Processes on each machine, a GPU each.")] = 1,
    num_nodes: Annotated[int, typer.Option(help="Machines; they share the folder of --out.")] = 1,
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
        from sinkwise.launching import check_processes, processes
        from sinkwise.parts import remove_parts
        from sinkwise.results import check_target
        from sinkwise.rules import Rules
        from sinkwise.scanning import scan, scan_share

        if (text is None) == (images is None):
            raise InputError("give either --text FILE or --images DIR")
        if images is not None and length is not None:
            raise InputError("--length is for --text; pictures have --size")
        if text is not None and size is not None:
            raise InputError("--size is for --images; texts have --length")
        check_processes(devices, num_nodes, device)
        options: dict[str, Any] = {"rules": Rules.named(rule), "screen": screen}
        check_target(out)
        inputs: Any
        if text is not None:
            inputs = text_inputs(
                text, length=length or DEFAULT_LENGTH, samples=samples, batch_size=batch_size
            )
        elif images is not None:
            inputs = image_inputs(images, samples=samples, batch_size=batch_size, size=size)
        place = out.resolve()
        options["parts"] = parts = place.parent / f".{place.name}-parts"
        with processes(devices, num_nodes, device, parts, _say) as group:
            if group.rank:  # the first process shows its own
                import transformers

                transformers.utils.logging.disable_progress_bar()
            module = load(model, dtype=dtype, device=group.device)
            if text is not None and length is None:
                longest = position_limit(module) or DEFAULT_LENGTH
                inputs = replace(inputs, length=min(DEFAULT_LENGTH, longest))
            share = -(-samples // group.world)
            with _progress("measuring", share, quiet=as_json or group.rank > 0) as update:
                options.update(progress=update, tell=_say)
                if group.world > 1:
                    shard = (group.rank, group.world)
                    scan_share(module, inputs, shard=shard, **options)
                    group.wait()
                    options.update(progress=None, tell=None)
                result = scan(module, inputs, **options) if group.rank == 0 else None
            if result is not None:
                _keep(result, out)
                remove_parts(parts)
                _print(result, out, as_json)


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
            place = out / result.meta["model"].removeprefix("demo:")
            _keep(result, place)
            _print(result, place, as_json)


def main() -> None:
    """Entry point of the command."""
    app()


@contextmanager
def _mistakes() -> Iterator[None]:
    """A user's mistake is one line on stderr and exit code 2, never a traceback."""
    try:
        yield
    except SinkwiseError as error:
        _say(str(error))
        raise typer.Exit(2) from None


def _say(line: str) -> None:
    """One line on stderr."""
    typer.echo("sinkwise: " + " ".join(line.split()), err=True)


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


def _keep(result: "Scan", out: Path) -> None:
    """Save a scan with its figure."""
    from sinkwise.files import write_bytes
    from sinkwise.reports.heads_figure import heads_figure, png

    result.save(out)
    write_bytes(out / "heads.png", png(heads_figure(result)))


def _print(result: "Scan", out: Path, as_json: bool) -> None:
    """Print a scan that is saved in `out`."""
    from sinkwise.reports.notes import notes
    from sinkwise.reports.table import layer_rows, layer_table

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
    for line in notes(result.meta):
        console.print(f"- {line}", highlight=False, markup=False)
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


@app.command()
def stream(
    model: Annotated[str, typer.Argument(help="hf:NAME, pypi:NAME or a local folder.")],
    text: Annotated[Path, typer.Option(help="A UTF-8 text file to read.")],
    cache_length: Annotated[int, typer.Option(help="Keys of every cache, sinks included.")] = 1024,
    num_sink_tokens: Annotated[str, typer.Option(help="Numbers of sinks: 0,1,2,4,8.")] = "4",
    tokens: Annotated[int, typer.Option(help="Tokens of the text.")] = 20480,
    recompute_every: Annotated[
        int, typer.Option(help="Score every so many tokens by recomputation: it is slow.")
    ] = 64,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")] = "cpu",
    out: Annotated[Path, typer.Option(help="Directory of the results.")] = Path("stream"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Endless text: perplexity, speed and memory of dense, window, recompute and sink caches."""
    with _mistakes():
        from sinkwise.files import write_bytes
        from sinkwise.hosts.load import load
        from sinkwise.reports.heads_figure import png
        from sinkwise.reports.stream_figure import stream_figure
        from sinkwise.reports.stream_table import stream_rows, stream_table
        from sinkwise.streaming import comparing, keeping

        try:
            sinks = [int(part) for part in num_sink_tokens.split(",")]
        except ValueError:
            raise InputError(
                f"--num-sink-tokens {num_sink_tokens!r}: numbers and commas, as in 0,1,2,4,8"
            ) from None
        if recompute_every < 1:
            raise InputError(f"--recompute-every {recompute_every}: at least 1 is right")
        methods = comparing.methods(cache_length, sinks)
        module = load(model, dtype=dtype, device=device)
        ids = keeping.text_tokens(module, text, tokens)
        facts = keeping.facts(f"{model} {dtype}", ids, recompute_every)
        courses = []
        for method in methods:
            one = keeping.load(method, facts, out)
            if one is None:
                with _progress(method.name, tokens, quiet=as_json) as update:
                    one = comparing.course(module, ids, method, recompute_every, update)
                keeping.save(one, facts, out)
            courses.append(one)
        title = f"{model}: {tokens:,} tokens, cache of {cache_length}"
        write_bytes(out / "perplexity.png", png(stream_figure(courses, title, cache_length)))
        if as_json:
            rows = stream_rows(courses, cache_length)
            typer.echo(json.dumps({**facts, "cache_length": cache_length, "rows": rows}))
            return
        from rich.console import Console

        console = Console(width=None if sys.stdout.isatty() else 120)
        console.print(stream_table(courses, cache_length, title))
        console.print(f"Recomputation scores every {recompute_every}th token. Saved in {out}/")
