"""Courses over a text as a table."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rich.table import Table

from sinkwise.streaming.comparison.compare import Gap, gap, perplexity
from sinkwise.streaming.comparison.scoring import MethodRun


def stream_rows(
    runs: Sequence[MethodRun], cache_length: int, times: Mapping[str, float] | None = None
) -> list[dict[str, object]]:
    """One row per method: perplexity once the cache is full, over the text, in its first and last
    quarter and at the tokens that recomputation scored; how far it is above recomputation there;
    milliseconds per token (`times`, by the method's name); MiB of cache. None where a run has no
    such tokens, and for a restarted cache.
    """
    end = max(one.positions[-1] for one in runs) + 1
    quarter = (end - cache_length) // 4
    exact = next((one for one in runs if one.method.kind == "recompute"), None)
    shared = set() if exact is None else set(exact.positions)
    rows: list[dict[str, object]] = []
    for one in runs:
        pairs = zip(one.positions, one.losses, strict=True)
        same = [pair for pair in pairs if pair[0] in shared]
        at = MethodRun(one.method, [p for p, _ in same], [loss for _, loss in same], 0)
        restarted = bool(one.method.restart_every)
        over = Gap(math.nan, math.nan, 0) if exact is None else gap(one, exact)
        numbers = {
            "first_quarter": perplexity(one, cache_length, cache_length + quarter),
            "last_quarter": perplexity(one, end - quarter, end),
            "at_recomputed": perplexity(at, 0, end),
            "over_recomputed": over.ratio - 1,
            "over_recomputed_error": over.standard_error,
            "milliseconds": (times or {}).get(one.method.name, math.nan),
        }
        unknown = {name for name, value in numbers.items() if restarted or math.isnan(value)}
        rows.append(
            {
                "cache": one.method.name,
                "kind": one.method.kind,
                "perplexity": perplexity(one, cache_length, end),
                **{name: None if name in unknown else value for name, value in numbers.items()},
                "mebibytes": one.bytes / 2**20,
            }
        )
    return rows


def restart_gap(runs: Sequence[MethodRun]) -> Gap | None:
    """How much worse a cache is than the same one restarted; None without a restarted one, or with
    fewer than two tokens to compare.
    """
    restarted = next((one for one in runs if one.method.restart_every), None)
    if restarted is None:
        return None
    method = replace(restarted.method, restart_every=0)
    found = gap(next(one for one in runs if one.method == method), restarted)
    return found if found.tokens > 1 else None


def restart_words(runs: Sequence[MethodRun]) -> str:
    """`restart_gap` as a sentence; empty if it is None."""
    found = restart_gap(runs)
    if found is None:
        return ""
    method = next(one.method for one in runs if one.method.restart_every)
    return (
        f"{method.name.partition(',')[0]} over the same cache restarted every "
        f"{method.restart_every:,} tokens, {2 * method.cache_length} or more after a restart: "
        f"{_percent(found.ratio - 1, found.standard_error)} on {found.tokens:,} tokens."
    )


def _percent(value: float, error: float) -> str:
    return f"{100 * value:+.1f} ± {100 * error:.1f} %"


def stream_table(
    runs: Sequence[MethodRun],
    cache_length: int,
    title: str,
    times: Mapping[str, float] | None = None,
) -> Table:
    """The rows as a table for a terminal."""
    table = Table(title=title)
    heads = ("cache", "perplexity", "first quarter", "last quarter", "at recomputed",
             "over recomputed", "ms/token", "MiB")  # fmt: skip
    for head in heads:
        table.add_column(head, justify="left" if head == "cache" else "right")
    for row in stream_rows(runs, cache_length, times):
        numbers = [row[key] for key in ("perplexity", "first_quarter", "last_quarter",
                                        "at_recomputed")]  # fmt: skip
        over, error = row["over_recomputed"], row["over_recomputed_error"]
        own = row["kind"] == "recompute" or over is None
        table.add_row(
            str(row["cache"]),
            *["-" if number is None else f"{number:,.2f}" for number in numbers],
            "-" if own else _percent(over, error),  # type: ignore[arg-type]
            "-" if row["milliseconds"] is None else f"{row['milliseconds']:.1f}",
            f"{row['mebibytes']:.1f}",
        )
    return table
