"""`sinkwise stream`: compare the caches for endless text on a text."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sinkwise.cli.common import MODEL_HELP, progress_bar, user_errors
from sinkwise.errors import InputError


def stream(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    text: Annotated[Path, typer.Option(help="A UTF-8 text file.")],
    cache_length: Annotated[int, typer.Option(help="Keys in every cache, sinks included.")] = 1024,
    num_sink_tokens: Annotated[
        str, typer.Option(help="Numbers of sink tokens to compare, as in 0,1,2,4,8.")
    ] = "4",
    tokens: Annotated[int, typer.Option(help="Number of tokens of the text.")] = 20480,
    recompute_every: Annotated[
        int, typer.Option(help="Score only every N-th token by recomputation, which is slow.")
    ] = 64,
    restart_every: Annotated[
        int,
        typer.Option(
            help="Also restart a cache every N tokens, to see whether a long text makes it worse; "
            "0: do not."
        ),
    ] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")] = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("stream"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare the perplexity, speed and memory of the caches for endless text on a text."""
    with user_errors():
        from sinkwise.mitigations.loading import load
        from sinkwise.reports.charts import png
        from sinkwise.reports.stream_figure import stream_figure
        from sinkwise.reports.stream_table import (
            restart_gap,
            restart_words,
            stream_rows,
            stream_table,
        )
        from sinkwise.storage.files import write_bytes
        from sinkwise.streaming.comparison import resuming
        from sinkwise.streaming.comparison.methods import check_length
        from sinkwise.streaming.comparison.methods import methods as methods_for
        from sinkwise.streaming.comparison.scoring import run_method
        from sinkwise.streaming.comparison.timing import step_times
        from sinkwise.streaming.comparison.tokens import text_tokens

        try:
            sinks = [int(part) for part in num_sink_tokens.split(",")]
        except ValueError:
            raise InputError(
                "--num-sink-tokens must be numbers separated by commas, as in 0,1,2,4,8; got "
                f"{num_sink_tokens!r}"
            ) from None
        if recompute_every < 1:
            raise InputError(f"--recompute-every must be at least 1; got {recompute_every}")
        methods = methods_for(cache_length, sinks, restart_every)
        for method in methods:  # before hours of work
            check_length(tokens, method)
        module = load(model, dtype=dtype, device=device)
        ids = text_tokens(module, text, tokens)
        facts = resuming.facts(module, f"{model} {dtype}", ids, recompute_every)
        runs = []
        for method in methods:
            one = resuming.load_run(method, facts, out)
            if one is None:
                with progress_bar(method.name, tokens, quiet=as_json) as update:
                    one = run_method(module, ids, method, recompute_every, update)
                resuming.save_run(one, facts, out)
            runs.append(one)
        times = step_times(module, ids, methods)
        title = f"{model}: {tokens:,} tokens, cache of {cache_length}"
        write_bytes(out / "perplexity.png", png(stream_figure(runs, title, cache_length)))
        if as_json:
            rows = stream_rows(runs, cache_length, times)
            restarted = restart_gap(runs)
            over = {} if restarted is None else {"over_restarted": asdict(restarted)}
            typer.echo(json.dumps({**facts, "cache_length": cache_length, "rows": rows, **over}))
            return
        from rich.console import Console

        console = Console(width=None if sys.stdout.isatty() else 120)
        console.print(stream_table(runs, cache_length, title, times))
        if restart_every:
            console.print(restart_words(runs), soft_wrap=True)
        console.print(f"Recomputation scored 1 of {recompute_every} tokens. Saved in {out}/")
