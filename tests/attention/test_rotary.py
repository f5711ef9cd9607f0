"""Rotations of keys against complex numbers."""

import pytest
import torch

from sinkwise.attention.rotary import Rotary
from tests.oracles.positions import rotate


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("start", [0, 3])
def test_rotations_add_up(interleaved: bool, start: int) -> None:
    torch.manual_seed(0)
    rotary = Rotary(torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64), start, interleaved)
    x = torch.randn(2, 3, 5, 11, dtype=torch.float64)
    there = rotary.rotate(rotary.rotate(x, torch.tensor(700)), torch.tensor(-653))
    torch.testing.assert_close(there, rotary.rotate(x, torch.tensor(47)), rtol=0, atol=1e-12)
    part = slice(start, start + 6)
    want = rotate(x[..., part], 47 * rotary.frequencies.expand(5, 3), interleaved)
    torch.testing.assert_close(there[..., part], want, rtol=0, atol=1e-12)
    rest = [d for d in range(11) if not start <= d < start + 6]
    assert torch.equal(there[..., rest], x[..., rest])
    torch.testing.assert_close(rotary.quarter(rotary.quarter(x[..., part])), -x[..., part])
