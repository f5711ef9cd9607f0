"""The kind of token at every position of a sequence: the token layout."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

KINDS = ("cls", "register", "patch", "bos", "first", "text", "special", "pad", "other")
"""The kinds of token, in the order of their codes. `first` is position 0 of causal attention where
no kind of its own is known, `other` any other position of unknown kind."""

UNSPECIFIC = ("text", "special", "other")
"""Kinds that say less about position 0 of causal attention than `first` does."""


def code(kind: str) -> int:
    """The integer that stands for `kind` in a layout's codes."""
    return KINDS.index(kind)


def name_first(codes: Int[Tensor, "batch key"]) -> Int[Tensor, "batch key"]:
    """The kinds of a causal call's keys: the first real token of each sample is `first`, unless its
    kind says more (`bos`, `cls`, `register`, `patch`).
    """
    real = codes != code("pad")
    unspecific = torch.tensor([code(kind) for kind in UNSPECIFIC], device=codes.device)
    first = real & (real.cumsum(dim=-1) == 1) & torch.isin(codes, unspecific)
    return codes.masked_fill(first, code("first"))


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """The kind of each position of each sample, and the patch grid of images.

    It comes from the model, its tokenizer and the inputs, never from a length.
    """

    codes: Int[Tensor, "batch key"]
    """Index into `KINDS` of each position."""
    grid: tuple[int, int] | None = None
    """Rows and columns of the patches, for images."""

    @classmethod
    def uniform(cls, kind: str, batch: int, length: int) -> "TokenLayout":
        """A layout with positions of a single kind."""
        return cls(torch.full((batch, length), code(kind), dtype=torch.int64))

    @classmethod
    def of_image(
        cls, batch: int, *, prefix: tuple[str, ...], grid: tuple[int, int]
    ) -> "TokenLayout":
        """Prefix tokens of the given kinds, then `grid` patches."""
        kinds = [*prefix, *["patch"] * (grid[0] * grid[1])]
        row = torch.tensor([code(kind) for kind in kinds], dtype=torch.int64)
        return cls(row.expand(batch, -1), grid)

    @property
    def batch(self) -> int:
        """The number of samples."""
        return self.codes.shape[0]

    @property
    def length(self) -> int:
        """The number of positions of each sample."""
        return self.codes.shape[1]

    @property
    def real(self) -> Bool[Tensor, "batch key"]:
        """False for padding, which counts neither as query nor as key."""
        return self.codes != code("pad")

    def kind(self, sample: int, token: int) -> str:
        """The kind of one position."""
        return KINDS[int(self.codes[sample, token])]
