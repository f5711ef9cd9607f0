"""`sinkwise demo`: the built-in demonstration, in the terminal and as a page."""

import json
from pathlib import Path
from typing import Annotated

import typer

from sinkwise.cli.common import make_folder, save_scan, scan_summary, user_errors


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the page and the scans.")] = Path(
        "sinkwise-demo"
    ),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per model instead of tables.")
    ] = False,
) -> None:
    """Show, on small trained models that ship with sinkwise, two algorithms behind one stripe."""
    with user_errors():
        from rich.console import Console

        from sinkwise.experiments.demonstration import DESCRIPTIONS, run_demo
        from sinkwise.reports.demo_page import demo_page
        from sinkwise.reports.table import layer_table

        console = Console(width=120)
        make_folder(out)
        found = {}
        for one in run_demo(out):
            found[one.name] = one
            folder = out / one.name
            save_scan(one.scan, folder)
            if as_json:
                summary = {**scan_summary(one.scan, folder), "error": one.error}
                typer.echo(json.dumps(summary, ensure_ascii=False))
                continue
            console.print(
                f"\n[bold]demo:{one.name}[/bold] {DESCRIPTIONS[one.name]}", highlight=False
            )
            console.print(layer_table(one.scan))
            verdict = one.scan.verdict()
            console.print(f"Prescription: {verdict.prescription}.", highlight=False)
        page = out / "index.html"
        demo_page(found).write(page)
        if not as_json:
            console.print(f"\nThe whole story, with figures: {page}", highlight=False)
