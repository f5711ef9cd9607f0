"""The table of a scan's layers, for a terminal."""

from typing import Any

import polars as pl
from rich.table import Table

from sinkwise.scanning.result import Scan

HEADINGS = (
    ("layer", "right"),
    ("sink", "left"),
    ("heads", "right"),
    ("inputs", "right"),
    ("NOP", "right"),
    ("bcast", "right"),
    ("other", "right"),
    ("received", "right"),
    ("first", "right"),
    ("ratio", "right"),
    ("rank", "right"),
    ("|x| max", "right"),
    ("median", "right"),
    ("cosine", "right"),
)


def layer_rows(scan: Scan) -> pl.DataFrame:
    """One row per layer: its most frequent sink, the number of heads with a sink, the mechanisms.

    - `heads` of `of` heads have a sink, in a share of `inputs` of the samples (median over them).
    - `token` and `kind` name the most frequent sink, with `hits` of the layer's `events`.
    - `nop`, `broadcast` and `other` are shares of the events; `received`, `ratio` (value ratio) and
      `rank` (stable rank) are medians over the events.
    - `received_first` is the mean attention to the first token over all heads.
    - `token_norm_max`, `token_norm_median` and `similarity_after` (mean pairwise cosine) describe
      the residual stream after the block.
    """
    sink = pl.col("verdict") != "none"
    heads = scan.heads.group_by("layer", "name").agg(
        sink.sum().alias("heads"),
        pl.len().alias("of"),
        pl.col("sink_share").filter(sink).median().alias("inputs"),
    )
    top = (
        scan.events.group_by("layer", "name", "kind", "token")
        .len()
        .sort("len", "token", descending=[True, False])
        .group_by("layer", "name", maintain_order=True)
        .first()
        .rename({"len": "hits"})
    )
    ratio = pl.coalesce(pl.col("value_ratio").fill_nan(None), pl.col("value_ratio_raw"))
    events = scan.events.group_by("layer", "name").agg(
        pl.len().alias("events"),
        (pl.col("mechanism") == "nop").mean().alias("nop"),
        (pl.col("mechanism") == "broadcast").mean().alias("broadcast"),
        (pl.col("mechanism") == "unclassified").mean().alias("other"),
        pl.col("received").median(),
        ratio.median().alias("ratio"),
        pl.col("stable_rank").fill_nan(None).median().alias("rank"),
    )
    columns = ["received_first", "token_norm_max", "token_norm_median", "similarity_after"]
    return (
        heads.join(scan.layers.select("layer", "name", *columns), on=["layer", "name"], how="left")
        .join(top, on=["layer", "name"], how="left")
        .join(events, on=["layer", "name"], how="left")
        .sort("layer", "name")
    )


def layer_table(scan: Scan) -> Table:
    """The layer rows as a table; a dash for a layer without a sink or without a residual stream."""
    table = Table(title=f"{scan.meta['model']}: {scan.meta['samples']} samples", box=None)
    for name, side in HEADINGS:
        table.add_column(name, justify="left" if side == "left" else "right", no_wrap=True)
    for row in layer_rows(scan).iter_rows(named=True):
        table.add_row(*_cells(row))
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    has_sink = row["heads"] > 0
    sink = "-"
    if has_sink and row["token"] is not None:
        sink = f"{row['token']} {row['kind']}"
        if row["hits"] < row["events"]:
            sink += f" ({row['hits'] / row['events']:.0%})"
    return [
        str(row["layer"]),
        sink,
        f"{row['heads']}/{row['of']}",
        _format(row["inputs"] if has_sink else None, "{:.0%}"),
        *(
            _format(row[name] if has_sink else None, "{:.0%}")
            for name in ("nop", "broadcast", "other")
        ),
        _format(row["received"] if has_sink else None, "{:.2f}"),
        _format(row["received_first"], "{:.2f}"),
        _format(row["ratio"] if has_sink else None, "{:.2f}"),
        _format(row["rank"] if has_sink else None, "{:.2f}"),
        _format(row["token_norm_max"], "{:,.1f}"),
        _format(row["token_norm_median"], "{:,.1f}"),
        _format(row["similarity_after"], "{:.2f}"),
    ]


def _format(value: float | None, pattern: str) -> str:
    return "-" if value is None or value != value else pattern.format(value)
