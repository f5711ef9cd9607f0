"""The plan of one call: which slots of a sink cache it reads and writes, and its mask.

All of it is index arithmetic on the CPU, shared by all layers with the same retention.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinkwise.core.retention import Retention

LONGEST_CHUNK = 256
"""Maximum number of tokens in one plan; each of them has its own copy of the sinks."""

SHARED, ORDINARY = -1, -2
"""Owners of a column: all queries for which nothing is evicted yet; every query."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of one call. Padding is neither stored nor counted."""

    seen: tuple[int, ...]
    """Real tokens of each row before the call."""
    length: int
    """New tokens per row, padding included."""
    real: Bool[Tensor, "batch query"] | None = None
    """Which new tokens are real; None if all are."""

    @cached_property
    def uniform(self) -> bool:
        """Whether all rows are at the same token, so that one rotation fits them all."""
        return self.real is None and len(set(self.seen)) == 1

    @cached_property
    def index(self) -> Int[Tensor, "batch query"]:
        """Each new token's index in its row; padding has the index of the token before it."""
        seen = torch.tensor(self.seen)[:, None]
        if self.real is None:
            return seen + torch.arange(self.length)
        return (seen + self.real.cumsum(1) - 1).clamp(min=0)

    @cached_property
    def after(self) -> tuple[int, ...]:
        """Real tokens of each row after the call."""
        if self.real is None:
            return tuple(seen + self.length for seen in self.seen)
        return tuple((torch.tensor(self.seen) + self.real.sum(1)).tolist())

    @cached_property
    def everywhere(self) -> Bool[Tensor, "batch query"]:
        """`real` as a tensor."""
        if self.real is None:
            return torch.ones(len(self.seen), self.length, dtype=torch.bool)
        return self.real


@dataclass(frozen=True, eq=False)
class Plan:
    """How the layers of one retention take a call.

    `append`: nothing is evicted; keys are written to slots 0, 1, 2, … and read from there.
    `step`: one token per row; it takes the slot of the evicted one, and the sinks are re-rotated.
    `chunk`: several tokens, some of which evict others: each query has its own copy of the sinks.
    """

    tokens: Tokens
    retention: Retention

    @cached_property
    def mode(self) -> str:
        """`append`, `step` or `chunk`."""
        if max(self.tokens.after) <= self.retention.capacity:
            return "append"
        return "step" if self.tokens.length == 1 else "chunk"

    @cached_property
    def columns(self) -> int:
        """Number of keys that attention gets."""
        sinks, window = self.retention.num_sink_tokens, self.retention.window_length
        if self.mode == "chunk":
            return sinks + self.tokens.length * (sinks + 1) + window
        return min(max(self.tokens.after), self.retention.capacity)

    @cached_property
    def keys(self) -> Int[Tensor, "batch column"]:
        """The token index of each column; −1 if a row has none there."""
        after = torch.tensor(self.tokens.after)
        if self.mode != "chunk":
            return self.retention.held(after)[:, : self.columns]
        sinks = self.retention.num_sink_tokens
        first = torch.arange(sinks).expand(len(after), -1)
        first = torch.where(first < after[:, None], first, -1)
        ring = self.retention.held(torch.tensor(self.tokens.seen))[:, sinks:]
        new = self.tokens.everywhere & (self.tokens.index >= sinks)
        new = torch.where(new, self.tokens.index, -1)
        return torch.cat([first.repeat(1, self.tokens.length + 1), ring, new], dim=1)

    @cached_property
    def owners(self) -> Int[Tensor, " column"]:
        """The query that a column is for: its number, `SHARED` or `ORDINARY`."""
        owner = torch.full((self.columns,), ORDINARY)
        if self.mode == "chunk":
            sinks = self.retention.num_sink_tokens
            copies = torch.arange(SHARED, self.tokens.length).repeat_interleave(sinks)
            owner[: len(copies)] = copies
        return owner

    @cached_property
    def visible(self) -> Bool[Tensor, "batch query column"]:
        """Which columns each query sees."""
        query = self.tokens.index[:, :, None]
        seen = self.retention.visible(query, self.keys[:, None, :])
        owner = self.owners[None, None, :]
        moved = self.retention.shift(query) > 0
        number = torch.arange(self.tokens.length)[None, :, None]
        mine = torch.where(moved, owner == number, owner == SHARED)
        return seen & (mine | (owner == ORDINARY))

    @cached_property
    def positions(self) -> Int[Tensor, "batch query column"]:
        """The cache position of each column for each query; 0 where it is not visible."""
        position = self.retention.position(self.tokens.index[:, :, None], self.keys[:, None, :])
        return torch.where(self.visible, position, 0)

    @cached_property
    def mask(self) -> Bool[Tensor, "batch query column"] | None:
        """`visible` if attention needs it; None if causal order is enough."""
        if self.tokens.uniform and self.mode != "chunk":
            return None
        return self.visible

    @cached_property
    def stored(
        self,
    ) -> tuple[Int[Tensor, " token"], Int[Tensor, " token"], Int[Tensor, " token"]]:
        """Row, number and slot of every new token that is still in the cache after the call."""
        last = torch.tensor(self.tokens.after)[:, None] - self.retention.window_length
        index, sinks = self.tokens.index, self.retention.num_sink_tokens
        kept = self.tokens.everywhere & ((index < sinks) | (index >= last))
        rows, numbers = kept.nonzero(as_tuple=True)
        return rows, numbers, self.retention.slot(index[rows, numbers])


def chunk_sizes(
    length: int, seen: int, retentions: Sequence[Retention], learned: int | None
) -> list[int]:
    """Lengths of the plans that `length` new tokens need: one that evicts nothing, then chunks.

    seen: real tokens of the longest row so far. retentions: of the layers with sinks, then others.
    learned: number of learned positions, if the model has them; some models have a table of masks
    of that size, which no chunk may exceed.
    """
    if length == 1:
        return [1]
    sinks, window = retentions[0].num_sink_tokens, retentions[0].window_length
    longest = max(16, min(LONGEST_CHUNK, window // max(sinks, 1)))
    if learned is not None:
        longest = min(longest, max(1, (learned - retentions[0].capacity) // (sinks + 1)))
    room = min(retention.capacity for retention in retentions) - seen
    sizes = [min(length, max(room, longest))]
    while (left := length - sum(sizes)) > 0:
        sizes.append(min(left, longest))
    return sizes
