"""Rotary positions as turns: a key that was rotated for one position, turned to another.

A turn by a shift δ maps every rotated pair (a, b) to (a cos δω − b sin δω, b cos δω + a sin δω).
Angles are built in float64 whatever the model's dtype, and carry no attention scaling (YaRN's
factor is in the key already).
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rotary:
    """Which coordinates of a head are rotated, in which pairs, how fast.

    Reference: Su et al., 2021, arXiv 2104.09864.
    """

    frequencies: Float[Tensor, " pair"]
    """ω, radians a position, float64."""
    start: int = 0
    """First rotated coordinate; partial rotary leaves the others as they are."""
    interleaved: bool = False
    """Pairs are neighbours (2i, 2i + 1), not halves (i, i + n)."""

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
        """Every pair turned by 90°: (a, b) → (−b, a)."""
        if self.interleaved:
            return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
        half = x.shape[-1] // 2
        return torch.cat([-x[..., half:], x[..., :half]], dim=-1)

    def turn(
        self, x: Float[Tensor, "*shape key head_dim"], shift: Int[Tensor, "*spread"]
    ) -> Float[Tensor, "*shape key head_dim"]:
        """`x` turned by `shift` positions (its shape broadcasts with all axes but the last), in at
        least float32.
        """
        working = torch.promote_types(x.dtype, torch.float32)
        angles = self.angles(shift).to(x.device)
        part = x[..., self.coordinates].to(working)
        turned = part * angles.cos().to(working) + self.quarter(part) * angles.sin().to(working)
        out = x.clone()
        out[..., self.coordinates] = turned.to(x.dtype)
        return out
