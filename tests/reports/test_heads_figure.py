"""The chart of heads: its data are the frame's, its colours the verdicts', and it renders."""

import re
import struct

import pytest
import torch
from torch import nn

import sinkwise as sw
from sinkwise.reports.charts import PIXEL_SCALE, png, svg
from sinkwise.reports.heads_figure import COLORS, heads_figure
from tests.planted import Planted, PlantedAttention, tokens


@pytest.fixture(scope="module")
def scan():
    model = Planted([[0, 1, None], [3, None, None]])
    return sw.scan(model, [tokens(3, 41, {0: [0], 1: [5], 3: [2]}, empty=[0, (1, 2)])])


def cells(chart):
    return chart.to_dict()["data"]["values"]


def test_one_cell_per_head(scan):
    found = {(cell["layer"], cell["head"]): cell for cell in cells(heads_figure(scan))}
    assert len(found) == len(scan.heads) == 6
    for row in scan.heads.iter_rows(named=True):
        cell = found[str(row["layer"]), row["head"]]
        assert cell["verdict"] == row["verdict"] and cell["sink_share"] == row["sink_share"]
    assert {cell["verdict"] for cell in found.values()} == {"nop", "broadcast", "none"}


def test_colours_and_words(scan):
    chart = heads_figure(scan).to_dict()
    scale = chart["encoding"]["color"]["scale"]
    assert dict(zip(scale["domain"], scale["range"], strict=True)) == COLORS
    assert set(COLORS) == {"nop", "broadcast", "mixed", "unclassified", "none"}
    assert len(set(COLORS.values())) == 5
    assert chart["title"]["text"] == "Attention sinks of Planted"
    assert chart["title"]["subtitle"].startswith("3 samples")
    assert chart["width"] * 2 == chart["height"] * 3


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.other_attn = PlantedAttention([0, None]), PlantedAttention([None, 1])

    def forward(self, x):
        return x + self.self_attn(x) + self.other_attn(x)


def test_two_attention_modules_of_a_layer_are_distinguished():
    model = Planted([[0]])
    model.layers = nn.ModuleList([Pair(), Pair()])
    found = sw.scan(model, [tokens(3, 41, {0: [0], 1: [4]})])
    rows = cells(heads_figure(found))
    assert len({(row["layer"], row["head"]) for row in rows}) == len(rows) == 8
    assert {row["layer"] for row in rows} == {
        f"{layer} {name}" for layer in (0, 1) for name in ("self_attn", "other_attn")
    }


def test_a_head_that_could_not_be_measured(scan):
    model = Planted([[0, 1]])
    model.layers[0].attn.v_proj.weight.data[0] = torch.nan
    found = sw.scan(model, [tokens(3, 41, {0: [0], 1: [3]})])
    assert cells(heads_figure(found))[0]["sink_share"] == 0.0


def test_many_layers_stay_in_order():
    found = sw.scan(Planted([[0]] * 12), [tokens(1, 41, {0: [0]})])
    assert [row["layer"] for row in cells(heads_figure(found))] == [str(i) for i in range(12)]
    assert heads_figure(found).to_dict()["encoding"]["y"]["sort"] is None


def test_png(scan):
    chart = heads_figure(scan)
    image = png(chart)
    assert image[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", image[16:24])
    declared = re.match(r'<svg[^>]* width="(\d+)" height="(\d+)"', svg(chart))
    size = [int(pixels) for pixels in declared.groups()]
    assert [width, height] == pytest.approx([PIXEL_SCALE * pixels for pixels in size], abs=2)
    assert min(size) > 50
