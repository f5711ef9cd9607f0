"""Courses over a text as a table."""

from collections.abc import Sequence

from rich.table import Table

from sinkwise.streaming.comparing import Course, perplexity


def stream_rows(courses: Sequence[Course], cache_length: int) -> list[dict[str, object]]:
    """One row a method: perplexity over the text once the cache is full, in its first and last
    quarter and by the positions that recomputation scored, milliseconds a token, MiB of cache.
    """
    end = max(one.positions[-1] for one in courses) + 1
    quarter = (end - cache_length) // 4
    shared = {position for one in courses if one.method.kind == "recompute"
              for position in one.positions}  # fmt: skip
    rows: list[dict[str, object]] = []
    for one in courses:
        pairs = zip(one.positions, one.losses, strict=True)
        same = [pair for pair in pairs if pair[0] in shared]
        at = Course(one.method, [p for p, _ in same], [loss for _, loss in same], 0.0, 0)
        rows.append(
            {
                "cache": one.method.name,
                "kind": one.method.kind,
                "perplexity": perplexity(one, cache_length, end),
                "first_quarter": perplexity(one, cache_length, cache_length + quarter),
                "last_quarter": perplexity(one, end - quarter, end),
                "at_recomputed": perplexity(at, 0, end),
                "milliseconds": one.milliseconds,
                "mebibytes": one.bytes / 2**20,
            }
        )
    return rows


def stream_table(courses: Sequence[Course], cache_length: int, title: str) -> Table:
    """The rows as a table for the terminal."""
    table = Table(title=title)
    heads = ("cache", "perplexity", "first quarter", "last quarter", "at recomputed", "ms/token")
    for head in (*heads, "MiB"):
        table.add_column(head, justify="left" if head == "cache" else "right")
    for row in stream_rows(courses, cache_length):
        numbers = [row[key] for key in ("perplexity", "first_quarter", "last_quarter",
                                        "at_recomputed")]  # fmt: skip
        table.add_row(
            str(row["cache"]),
            *[f"{number:,.2f}" for number in numbers],
            f"{row['milliseconds']:.1f}",
            f"{row['mebibytes']:.1f}",
        )
    return table
