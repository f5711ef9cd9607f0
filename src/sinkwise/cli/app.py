"""The `sinkwise` command."""

import typer

from sinkwise.cli import synthetic
from sinkwise.cli.demo import demo
from sinkwise.cli.diagnose import diagnose
from sinkwise.cli.mitigate import mitigate
from sinkwise.cli.stream import stream

app = typer.Typer(
    help="Find attention sinks, tell which mechanism causes each one, and fix them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(diagnose)
app.command()(mitigate)
app.command()(stream)
app.add_typer(synthetic.app, name="synthetic")


@app.callback()
def _root() -> None:
    """Find attention sinks, tell which mechanism causes each one, and fix them."""


def main() -> None:
    """Entry point of the command."""
    app()
