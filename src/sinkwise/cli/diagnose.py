"""`sinkwise diagnose`: which sinks a model has, what causes each one, and what to do about it."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sinkwise.cli.common import MODEL_HELP, progress_bar, save_scan, say, scan_summary, user_errors
from sinkwise.errors import InputError

if TYPE_CHECKING:
    from sinkwise.scanning.result import Scan

DEFAULT_LENGTH = 1024
"""Tokens per text sample, if the model has that many positions."""


def diagnose(
    model: Annotated[
        str,
        typer.Argument(help=MODEL_HELP),
    ],
    text: Annotated[Path | None, typer.Option(help="A UTF-8 text file.")] = None,
    images: Annotated[Path | None, typer.Option(help="A folder of images.")] = None,
    length: Annotated[
        int | None,
        typer.Option(help="Tokens per text sample; default: 1024, or all positions the model has."),
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(help="Height and width of an image in pixels; default: the model's own."),
    ] = None,
    samples: Annotated[int, typer.Option(help="Maximum number of text windows or images.")] = 16,
    batch_size: Annotated[int, typer.Option(help="Samples per forward pass.")] = 4,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")] = "cpu",
    rule: Annotated[str, typer.Option(help="auto, mean, relaxed or literal.")] = "auto",
    screen: Annotated[
        bool,
        typer.Option(
            "--screen",
            help="For long sequences: estimate candidates from a sample of the queries first.",
        ),
    ] = False,
    devices: Annotated[
        int, typer.Option(help="Processes per machine, each on its own GPU if there are any.")
    ] = 1,
    num_nodes: Annotated[
        int, typer.Option(help="Number of machines; they share the folder of --out.")
    ] = 1,
    out: Annotated[Path, typer.Option(help="Folder to save the scan in.")] = Path("scan"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables.")
    ] = False,
) -> None:
    """Find the attention sinks of MODEL, the mechanism behind each one, and what to do about it."""
    with user_errors():
        from sinkwise.cli.processes import check_processes, processes
        from sinkwise.data.images import images as image_inputs
        from sinkwise.data.text import text as text_inputs
        from sinkwise.diagnosis.rules import Rules
        from sinkwise.hosts.inputs import position_limit
        from sinkwise.mitigations.loading import load
        from sinkwise.scanning.batch_store import remove_parts
        from sinkwise.scanning.result import check_target
        from sinkwise.scanning.scan import scan, scan_share

        if (text is None) == (images is None):
            raise InputError("give exactly one of --text FILE and --images DIR")
        if images is not None and length is not None:
            raise InputError("--length applies to --text only; use --size for --images")
        if text is not None and size is not None:
            raise InputError("--size applies to --images only; use --length for --text")
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
        target = out.resolve()
        options["parts"] = parts = target.parent / f".{target.name}-parts"
        with processes(devices, num_nodes, device, parts, say) as group:
            if group.rank:  # the first process shows one bar for all
                import transformers

                transformers.utils.logging.disable_progress_bar()
            module = load(model, dtype=dtype, device=group.device)
            if text is not None and length is None:
                longest = position_limit(module) or DEFAULT_LENGTH
                inputs = replace(inputs, length=min(DEFAULT_LENGTH, longest))
            share = -(-samples // group.world)
            with progress_bar("measuring", share, quiet=as_json or group.rank > 0) as update:
                options.update(progress=update, tell=say)
                if group.world > 1:
                    shard = (group.rank, group.world)
                    scan_share(module, inputs, shard=shard, **options)
                    group.wait()
                    options.update(progress=None, tell=None)
                result = scan(module, inputs, **options) if group.rank == 0 else None
            if result is not None:
                save_scan(result, out)
                remove_parts(parts)
                _print(result, out, as_json)


def _print(result: "Scan", out: Path, as_json: bool) -> None:
    """Print a scan saved in `out`."""
    if as_json:
        typer.echo(json.dumps(scan_summary(result, out), ensure_ascii=False))
        return
    from rich.console import Console

    from sinkwise.reports.notes import notes
    from sinkwise.reports.table import layer_table

    verdict = result.verdict()
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
        f"(bidirectional). Mechanism: {_rule(rules['mechanism'])}.\nSaved in {out}/",
        highlight=False,
        markup=False,
    )


def _rule(rule: dict[str, Any]) -> str:
    name = rule.get("name")
    numbers = ", ".join(f"{key}={value}" for key, value in rule.items() if key != "name")
    return f"{name}({numbers})" if name else numbers
