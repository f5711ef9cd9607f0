"""Rotary positions: keys that were rotated for one position, re-rotated for another.

A rotation by a shift δ maps every pair (a, b) to (a cos δω − b sin δω, b cos δω + a sin δω).
Angles are computed in float64 whatever the model's dtype, without attention scaling (YaRN's factor
is part of the key already).
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rotary:
    """Which coordinates of a head are rotated, in which pairs, and how fast.

    Reference: Su et al., 2021, arXiv 2104.09864.
    """

    frequencies: Float[Tensor, " pair"]
    """ω, radians per position, float64."""
    start: int = 0
    """First rotated coordinate; partial rotary positions leave the others unchanged."""
    interleaved: bool = False
    """Whether pairs are neighbours (2i, 2i + 1) rather than halves (i, i + n)."""

    @cached_property
    def coordinates(self) -> slice:
        """The rotated coordinates of a head."""
        return slice(self.start, self.start + 2 * len(self.frequencies))

    def angles(self, shift: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape rotated"]:
        """δω for every rotated coordinate, float64."""
        pairs = shift.to(torch.float64)[..., None] * self.frequencies
        if self.interleaved:
            return pairs.repeat_interleave(2, dim=-1)
        return torch.cat([pairs, pairs], dim=-1)

    def quarter(self, x: Float[Tensor, "*shape rotated"]) -> Float[Tensor, "*shape rotated"]:
        """Every pair rotated by 90°: (a, b) → (−b, a)."""
        if self.interleaved:
            return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
        half = x.shape[-1] // 2
        return torch.cat([-x[..., half:], x[..., :half]], dim=-1)

    def rotate(
        self, x: Float[Tensor, "*shape key head_dim"], shift: Int[Tensor, "*spread"]
    ) -> Float[Tensor, "*shape key head_dim"]:
        """`x` rotated by `shift` positions, computed in at least float32.

        The shape of `shift` broadcasts with all axes of `x` except the last.
        """
        working = torch.promote_types(x.dtype, torch.float32)
        angles = self.angles(shift).to(x.device)
        part = x[..., self.coordinates].to(working)
        rotated = part * angles.cos().to(working) + self.quarter(part) * angles.sin().to(working)
        out = x.clone()
        out[..., self.coordinates] = rotated.to(x.dtype)
        return out
