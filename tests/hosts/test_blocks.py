"""Blocks: the lists of layers that hold attention, numbered through the whole model."""

import pytest
import torch
from torch import nn

from sinkwise.hosts.blocks import LayerIndex, clean, find_blocks, holds_attention
from tests.models import CASES, NO_ATTENTION, Case, build


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_blocks_are_numbered_as_the_records_are(case: Case) -> None:
    model, _ = case.build()
    blocks = find_blocks(model)
    modules = dict(model.named_modules())
    assert [block.layer for block in blocks] == list(range(len(blocks)))
    assert all(modules[block.name] is block.module for block in blocks)
    assert len({block.name for block in blocks}) == len(blocks)
    for one in blocks:  # no block is inside another
        assert not any(other.name.startswith(one.name + ".") for other in blocks)
    inside = [layer for layer in case.layers if layer < len(blocks)]
    assert inside or case.name.startswith("nn-mha")


@pytest.mark.parametrize(
    ("name", "first", "count"),
    [
        ("llama-sdpa", "model.layers.0", 2),
        ("gpt2-sdpa", "transformer.h.0", 2),
        ("qwen3-next-sdpa", "layers.0", 4),
        ("t5-sdpa", "encoder.block.0", 4),
        ("whisper-sdpa", "encoder.layers.0", 4),
        ("clip-sdpa", "text_model.encoder.layers.0", 4),
        ("timm-swin-sdpa", "layers.0.blocks.0", 4),
        ("timm-cait-sdpa", "blocks.0", 4),
        ("open_clip", "visual.transformer.resblocks.0", 4),
        ("dinov2-hub-chunks", "blocks.0.0", 4),
        ("dinov3-hub", "blocks.0", 2),
        ("nn-transformer", "encoder.layers.0", 4),
        ("bert-sdpa", "encoder.layer.0", 2),
    ],
)
def test_known_lists(name: str, first: str, count: int) -> None:
    blocks = find_blocks(build(name)[0])
    assert (blocks[0].name, len(blocks)) == (first, count)


def test_a_decoder_s_blocks_come_after_its_encoder_s() -> None:
    blocks = find_blocks(build("bart-sdpa")[0])
    assert [block.name.split(".")[0] for block in blocks] == ["encoder"] * 2 + ["decoder"] * 2


def test_networks_without_attention_have_no_blocks() -> None:
    for name in ("resnet", "mixer", "resmlp", "poolformer"):
        assert find_blocks(NO_ATTENTION[name]()[0]) == []


class Attention(nn.Module):
    """Attention by its name."""


class Recurrent(nn.Module):
    """A layer of another kind."""


class Attending(nn.Module):
    """A layer that contains one."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = Attention()


def test_unlike_layers_count_too() -> None:
    """A hybrid whose layers are of several classes: positions in the list stay the layers."""
    mixed = nn.ModuleList([Recurrent(), Attending(), Recurrent(), Attending()])
    model = nn.Module()
    model.layers = mixed
    assert [block.name for block in find_blocks(model)] == [f"layers.{i}" for i in range(4)]
    assert LayerIndex(find_blocks(model)).layer("layers.3") == 3


def test_names_that_hold_attention() -> None:
    model = nn.Module()
    assert not holds_attention(model)
    model.attn = nn.Linear(2, 2)
    assert holds_attention(model)
    assert holds_attention(nn.MultiheadAttention(4, 2)) and not holds_attention(nn.Linear(2, 2))


def test_shared_layers_and_layers_outside() -> None:
    index = LayerIndex(find_blocks(build("albert-sdpa")[0]))
    path = "encoder.albert_layer_groups.0.albert_layers.0.attention"
    assert [index.layer(path, call) for call in range(3)] == [0, 1, 2]
    index = LayerIndex(find_blocks(build("timm-vit-pool-sdpa")[0]))
    assert index.block("attn_pool") is None
    assert [index.layer(path) for path in ("attn_pool", "other", "attn_pool")] == [2, 3, 2]
    assert index.layer("blocks.1.attn", call=1) == 1


def test_compiled_wrappers_leave_no_trace_in_names() -> None:
    assert clean("_orig_mod.layers.0._orig_mod.attn") == "layers.0.attn"
    model, _ = build("llama-sdpa")
    names = [block.name for block in find_blocks(model)]
    assert [b.name for b in find_blocks(torch.compile(model, backend="eager"))] == names
