"""Scan: run a model over data once, and measure every attention call as it happens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from sinkwise.attention.screen import Screen
from sinkwise.core.layout import TokenLayout
from sinkwise.diagnosis.rules import Rules
from sinkwise.errors import InputError
from sinkwise.scanning.observed import Observed
from sinkwise.scanning.result import Scan
from sinkwise.scanning.run import Run, ScanOptions, evaluating


def scan(
    model: nn.Module,
    batches: Any,
    *,
    rules: Rules | str = "auto",
    screen: Screen | bool = False,
    layout: Callable[[Any], TokenLayout] | None = None,
    progress: Callable[[int], None] | None = None,
    parts: str | Path | None = None,
    tell: Callable[[str], None] | None = None,
) -> Scan:
    """Run `model` once over `batches` and measure all its attention calls.

    - `batches`: `sinkwise.text(...)`, `sinkwise.images(...)`, or an iterable of what the module
      takes: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.
    - `rules`: `auto`, the name of an event rule, or a `Rules` object.
    - `screen`: for long sequences: find the candidates from a sample of the queries, and compute
      only their attention over all queries. Every reported event is exact; a sink is missed with a
      probability of at most `Screen.miss`; the shares by kind of token become estimates.
    - `layout`: names the tokens of a batch, if neither images nor token ids tell their kind.
    - `progress`: called after each batch with the number of samples so far.
    - `parts`: a directory for finished batches. If a scan was interrupted, running it again with
      the same arguments measures only the missing batches, and the result is equal bit for bit
      (with as many threads). Batches of another model, other rules or other data are never used:
      they are removed. `sinkwise.scanning.batch_store.remove_parts` removes all of them.
    - `tell`: called with one line if `parts` had finished batches.

    The model runs in eval mode without gradients, and is left as it was. Apart from the rows of the
    result, memory does not grow with the number of batches. Raises CaptureError if no attention
    over tokens was seen, and InputError for unusable input.
    """
    run = Run(
        model,
        batches,
        ScanOptions(rules=rules, screen=screen, layout=layout, parts=parts, tell=tell),
    )
    run.clean_store()
    total = Observed()
    with evaluating(model):
        for observed in run.observe(0, 1):
            total.append(observed)
            if progress is not None:
                progress(total.sums.samples)
    return run.result(total)


def scan_share(
    model: nn.Module,
    batches: Any,
    *,
    parts: str | Path,
    shard: tuple[int, int],
    rules: Rules | str = "auto",
    screen: Screen | bool = False,
    layout: Callable[[Any], TokenLayout] | None = None,
    progress: Callable[[int], None] | None = None,
    tell: Callable[[str], None] | None = None,
) -> int:
    """Measure one process's share of a scan into the directory `parts`; return its number of
    samples.

    - `shard`: (rank, world). Rank r of w takes batches r, r + w, r + 2 w, ... of the same
      `batches`. Images of other shares are not opened (except the first one, if weights must be
      measured); a text is tokenized by every process; any other iterable is run through, and
      batches of other shares are dropped. When all processes are done, `scan` with the same
      arguments and `parts` reads all batches and gives what a single process would have given, bit
      for bit.

    For other arguments and errors see `scan`.
    """
    rank, world = shard
    if not 0 <= rank < world:
        raise InputError(f"shard={shard} must be (rank, world) with 0 <= rank < world")
    run = Run(
        model,
        batches,
        ScanOptions(rules=rules, screen=screen, layout=layout, parts=parts, tell=tell),
    )
    if rank == 0:
        run.clean_store(world)
    samples = 0
    with evaluating(model):
        for observed in run.observe(rank, world):
            samples += observed.sums.samples
            if progress is not None:
                progress(samples)
    return samples
