"""`sinkwise diagnose`: which sinks a model has, what each one is, and what to do about it."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sinkwise.cli.common import keep_scan, mistakes, progress_bar, say, scan_summary
from sinkwise.errors import InputError

if TYPE_CHECKING:
    from sinkwise.scanning.result import Scan

DEFAULT_LENGTH = 1024
"""Tokens of a text sample, where the model has as many positions."""


def diagnose(
    model: Annotated[
        str,
        typer.Argument(
            help="hf:NAME, timm:NAME, open_clip:ARCH/TAG, pypi:NAME, hub:REPO/NAME, or a folder."
        ),
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
    with mistakes():
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
        with processes(devices, num_nodes, device, parts, say) as group:
            if group.rank:  # the first process shows its own
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
                keep_scan(result, out)
                remove_parts(parts)
                _print(result, out, as_json)


def _print(result: "Scan", out: Path, as_json: bool) -> None:
    """Print a scan that is saved in `out`."""
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
        f"(both ways). Mechanism: {_rule(rules['mechanism'])}.\nSaved in {out}/",
        highlight=False,
        markup=False,
    )


def _rule(rule: dict[str, Any]) -> str:
    name = rule.get("name")
    numbers = ", ".join(f"{key}={value}" for key, value in rule.items() if key != "name")
    return f"{name}({numbers})" if name else numbers
