"""What commands share: mistakes in one line, a progress bar, safe places for their files."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sinkwise.errors import InputError, SinkwiseError

if TYPE_CHECKING:
    from sinkwise.scanning.result import Scan


@contextmanager
def mistakes() -> Iterator[None]:
    """A user's mistake is one line on stderr and exit code 2, never a traceback."""
    try:
        yield
    except SinkwiseError as error:
        say(str(error))
        raise typer.Exit(2) from None


def say(line: str) -> None:
    """One line on stderr."""
    typer.echo("sinkwise: " + " ".join(line.split()), err=True)


@contextmanager
def progress_bar(what: str, total: int, quiet: bool) -> Iterator[Callable[[int], None] | None]:
    """A progress bar on stderr, moved by calls with what is done; None where nobody watches."""
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


def make_folder(out: Path) -> None:
    """Make a folder for results. Raises InputError where that is impossible."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {str(out)!r} cannot be a folder: {error.strerror}") from error


def keep_scan(result: "Scan", out: Path) -> None:
    """Save a scan with its figure."""
    from sinkwise.reports.charts import png
    from sinkwise.reports.heads_figure import heads_figure
    from sinkwise.storage.files import write_bytes

    result.save(out)
    write_bytes(out / "heads.png", png(heads_figure(result)))


def scan_summary(result: "Scan", out: Path) -> dict[str, Any]:
    """What `--json` prints of a scan that is saved in `out`."""
    from sinkwise.reports.table import layer_rows

    verdict = result.verdict()
    return {
        **result.meta,
        "prescription": verdict.prescription,
        "advice": verdict.advice,
        "evidence": list(verdict.evidence),
        "layers": layer_rows(result).to_dicts(),
        "out": str(out),
    }
