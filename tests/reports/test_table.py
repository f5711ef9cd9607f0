"""The layer table: each cell is a number of the scan's frames."""

import io

import polars as pl
import pytest
from rich.console import Console

import sinkwise as sw
from sinkwise.reports.table import HEADINGS, layer_rows, layer_table
from tests.planted import Planted, kinds, tokens


@pytest.fixture(scope="module")
def scan():
    """Layer 0: three of four heads sink, one on two tokens; 1: none; 2: on some samples."""
    model = Planted([[0, 1, None, 2], [None] * 4, [3, None, None, 3]])
    x = tokens(4, 83, {0: [0], 1: [5], 2: [0, 9], 3: [7]}, empty=[0])
    x[2:, 7, 4] = 0  # no marker 3 in half of the samples
    return sw.scan(model, [x], layout=kinds("bos", rest="text"))


def test_rows(scan):
    rows = layer_rows(scan).to_dicts()
    assert [row["layer"] for row in rows] == [0, 1, 2]
    first, second, third = rows
    assert (first["heads"], first["of"], first["inputs"]) == (3, 4, 1.0)
    # Heads 0 and 3 sink on token 0, head 1 on 5, head 3 on 9 too: 16 events of four samples.
    assert (first["token"], first["kind"], first["hits"], first["events"]) == (0, "bos", 8, 16)
    assert (first["nop"], first["broadcast"], first["other"]) == (0.5, 0.5, 0.0)
    events = scan.events.filter(pl.col("layer") == 0)
    for column, source in (
        ("received", "received"),
        ("ratio", "value_ratio"),
        ("rank", "stable_rank"),
    ):
        values = sorted(events[source].to_list())
        middle = (values[7] + values[8]) / 2
        assert first[column] == pytest.approx(middle, rel=1e-6)
    assert (second["heads"], second["of"]) == (0, 4)
    assert second["inputs"] is second["token"] is second["nop"] is second["received"] is None
    assert (third["heads"], third["inputs"], third["token"]) == (2, 0.5, 7)
    assert (third["nop"], third["broadcast"]) == (0.0, 1.0)
    for row, layer in zip(rows, scan.layers.to_dicts(), strict=True):
        for name in ("received_first", "token_norm_max", "token_norm_median", "similarity_after"):
            assert row[name] == layer[name]


def text(scan):
    console = Console(width=200, no_color=True, record=True, file=io.StringIO())
    console.print(layer_table(scan))
    return console.export_text().splitlines()


def test_the_table_as_printed(scan):
    lines = text(scan)
    assert "Planted: 4 samples" in lines[0]
    assert len(layer_table(scan).columns) == len(HEADINGS)
    rows = [line.split() for line in lines if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert rows[0][1:8] == ["0", "bos", "(50%)", "3/4", "100%", "50%", "50%"]
    assert rows[1][1:7] == ["-", "0/4", "-", "-", "-", "-"]
    assert rows[2][1:8] == ["7", "text", "2/4", "50%", "0%", "100%", "0%"]
    for row, layer in zip(rows, scan.layers.to_dicts(), strict=True):
        assert row[-3:] == [
            f"{layer['token_norm_max']:,.1f}",
            f"{layer['token_norm_median']:,.1f}",
            f"{layer['similarity_after']:.2f}",
        ]
        assert f"{layer['received_first']:.2f}" in row


def test_unknown_numbers_are_dashes(scan):
    nan = float("nan")
    layers = scan.layers.with_columns(
        similarity_after=pl.lit(nan), token_norm_max=pl.lit(None, pl.Float64)
    )
    events = scan.events.with_columns(stable_rank=pl.lit(nan, pl.Float32))
    unknown = sw.Scan(events, scan.heads, layers, scan.meta)
    rows = [line.split() for line in text(unknown) if line.strip()[:1].isdigit()]
    assert all(row[-1] == "-" and row[-3] == "-" and row[-4] == "-" for row in rows)


def test_without_output_weights_the_raw_ratio_is_shown(scan):
    nan = pl.lit(float("nan"), pl.Float32)
    raw = sw.Scan(scan.events.with_columns(value_ratio=nan), scan.heads, scan.layers, scan.meta)
    events = scan.events.filter(pl.col("layer") == 2)
    ratio = layer_rows(raw).filter(pl.col("layer") == 2)["ratio"].item()
    assert ratio == pytest.approx(events["value_ratio_raw"].median())
