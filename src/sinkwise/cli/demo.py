"""`sinkwise demo`: the embedded demonstration, in the terminal and as a page."""

import json
from pathlib import Path
from typing import Annotated

import typer

from sinkwise.cli.common import keep_scan, make_folder, mistakes, scan_summary


def demo(
    out: Annotated[Path, typer.Option(help="Directory for the page and the scans.")] = Path(
        "sinkwise-demo"
    ),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a model instead of tables.")
    ] = False,
) -> None:
    """Show on small trained models that ship with sinkwise that one stripe is two algorithms."""
    with mistakes():
        from rich.console import Console

        from sinkwise.experiments.demonstration import WORDS, run_demo
        from sinkwise.reports.demo_page import demo_page
        from sinkwise.reports.table import layer_table

        console = Console(width=120)
        make_folder(out)
        found = {}
        for one in run_demo(out):
            found[one.name] = one
            place = out / one.name
            keep_scan(one.scan, place)
            if as_json:
                summary = {**scan_summary(one.scan, place), "error": one.error}
                typer.echo(json.dumps(summary, ensure_ascii=False))
                continue
            console.print(f"\n[bold]demo:{one.name}[/bold] {WORDS[one.name]}", highlight=False)
            console.print(layer_table(one.scan))
            verdict = one.scan.verdict()
            console.print(f"Prescription: {verdict.prescription}.", highlight=False)
        page = out / "index.html"
        demo_page(found).write(page)
        if not as_json:
            console.print(f"\nThe whole story, with pictures: {page}", highlight=False)
