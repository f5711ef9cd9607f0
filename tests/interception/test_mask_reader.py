"""Masks are recognised for what they are, show the same keys, and are read once per tensor."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sinkwise.attention.reference import visibility
from sinkwise.core.records import OPEN, AttentionMask
from sinkwise.interception import mask_reader
from sinkwise.interception.mask_reader import MaskReader, recognised

TILE = torch.ones(1, 1, 7, 7, dtype=torch.bool).tril()
BOOL: dict[str, tuple[Tensor, Callable[[AttentionMask], bool]]] = {
    "causal": (TILE, lambda m: m.causal and m.allowed is None and m.window is None),
    "cached": (torch.ones(1, 1, 7, 11).tril(4).bool(),
               lambda m: m.causal and m.allowed is None and m.offset == 4),
    "static": (torch.ones(1, 1, 7, 17).tril(4).bool(), lambda m: m.causal and m.offset == 4),
    "window": (TILE.triu(-2), lambda m: m.window == 3 and m.causal and m.allowed is None),
    "left padding": (TILE & (torch.arange(7) > 1), lambda m: m.causal and m.allowed is not None),
    "right padding": (TILE & (torch.arange(7) < 5), lambda m: m.causal and m.offset == 0),
    "padding": ((torch.arange(7) < 5).expand(1, 1, 7, 7), lambda m: not m.causal),
    "padded memory": ((torch.arange(17) < 9).expand(1, 1, 7, 17), lambda m: not m.causal),
    "prefix": (TILE | (torch.arange(7) < 3), lambda m: not m.causal),
    "strict": (TILE.tril(-1), lambda m: not m.causal),
    "open": (torch.ones(1, 1, 7, 7).bool(), lambda m: not m.causal),
    "nothing": (torch.zeros(1, 1, 7, 7).bool(), lambda m: not m.causal),
    "one row for all": (torch.ones(1, 1, 1, 7).bool(), lambda m: not m.causal),
    "two windows": (torch.stack([TILE[0].triu(-2), TILE[0].triu(-3)]),
                    lambda m: m.causal and m.window is None and m.allowed is not None),
}  # fmt: skip


@pytest.mark.parametrize("form", ["allowed", "additive", "lowest", "biased"])
@pytest.mark.parametrize("name", BOOL)
def test_recognised_masks_show_the_same(name: str, form: str) -> None:
    tensor, expected = BOOL[name]
    low = -torch.inf if form != "lowest" else torch.finfo(torch.float32).min
    mask = AttentionMask(allowed=tensor)
    if form != "allowed":
        bias = torch.zeros(tensor.shape)
        if form == "biased":
            bias = bias + torch.linspace(-1, 1, tensor.shape[-1])
        mask = AttentionMask(additive=bias.masked_fill(~tensor, low))
    queries, keys = 7, tensor.shape[3]
    found = recognised(mask, queries, keys)
    size = tensor.shape[0], 1, queries, keys, "cpu"
    assert torch.equal(visibility(found, *size), visibility(mask, *size))
    if form == "biased":
        assert found.additive is mask.additive
    elif form == "allowed":
        assert expected(found)
    else:
        assert expected(replace(found, allowed=found.additive, additive=None)
                        if found.additive is None else
                        replace(found, allowed=tensor, additive=None))  # fmt: skip


def test_one_query_stands_at_the_end_of_its_keys() -> None:
    assert recognised(OPEN, 1, 11).offset == 10
    assert recognised(OPEN, 1, 11).is_open
    assert recognised(OPEN, 3, 11) is OPEN
    shown = torch.arange(11) < 6
    assert recognised(AttentionMask(allowed=shown[None, None, None]), 1, 11).offset == 5


def test_a_mask_that_layers_share_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(*args) -> AttentionMask:
        calls.append(1)
        return recognised(*args)

    monkeypatch.setattr(mask_reader, "recognised", counted)
    reader, tensor, q, k = MaskReader(), TILE.clone(), torch.randn(2, 3, 7, 8), TILE.float()
    mask = AttentionMask(allowed=tensor)
    first = reader.read(mask, tensor, q, k)
    assert first.causal and reader.read(mask, tensor, q, k) is first and len(calls) == 1
    tensor[..., 0] = False  # overwritten: another mask
    assert reader.read(mask, tensor, q, k).allowed is not None and len(calls) == 2
    reader.clear()
    reader.read(mask, tensor, q, k)
    reader.read(mask, None, q, k)
    assert len(calls) == 4
