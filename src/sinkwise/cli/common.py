"""What the commands share: one-line errors, a progress bar, output folders, saved scans."""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sinkwise.errors import InputError, SinkwiseError

if TYPE_CHECKING:
    from sinkwise.scanning.result import Scan


MODEL_HELP = (
    "hf:NAME, timm:NAME, open_clip:ARCH/TAG, pypi:NAME, hub:REPO/NAME, or a local folder "
    "(transformers' layout, or one that `sinkwise mitigate` saved)."
)
"""What every MODEL argument takes: whatever `sinkwise.load` takes."""

_ARGUMENT = re.compile(r"^(\w+)=(?=\S)")
"""A library error that begins with the argument it refuses: `samples=0 must be ...`."""


@contextmanager
def user_errors(**options: str) -> Iterator[None]:
    """Report a user's error as one line on stderr with exit code 2, never as a traceback.

    An argument of the library that the error begins with is spelled as the option that the user
    typed: `samples=0 must be ...` as `--samples 0 must be ...`. `options` are those whose names
    differ: `kind="--gate"`.
    """
    try:
        yield
    except SinkwiseError as error:
        say(_with_option(str(error), options))
        raise typer.Exit(2) from None


def _with_option(message: str, options: dict[str, str]) -> str:
    found = _ARGUMENT.match(message)
    if found is None:
        return message
    name = found.group(1)
    option = options.get(name, "--" + name.replace("_", "-"))
    typed = any(word == option or word.startswith(f"{option}=") for word in sys.argv)
    return _ARGUMENT.sub(f"{option} ", message) if typed else message


def say(line: str) -> None:
    """Print one line on stderr."""
    typer.echo("sinkwise: " + " ".join(line.split()), err=True)


@contextmanager
def progress_bar(what: str, total: int, quiet: bool) -> Iterator[Callable[[int], None] | None]:
    """A progress bar on stderr; yields a setter of the work done, or None if nobody watches."""
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
    """Make a folder for results. Raises InputError if that is impossible."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--out must name a folder that can be made; got {str(out)!r} ({error.strerror})"
        ) from error


def save_scan(result: "Scan", out: Path) -> None:
    """Save a scan and its figure."""
    from sinkwise.reports.charts import png
    from sinkwise.reports.heads_figure import heads_figure
    from sinkwise.storage.files import write_bytes

    result.save(out)
    write_bytes(out / "heads.png", png(heads_figure(result)))


def scan_summary(result: "Scan", out: Path) -> dict[str, Any]:
    """What `--json` prints for a scan saved in `out`."""
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
