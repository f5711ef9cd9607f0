"""Keep the first and the most recent: which of a growing sequence stays, in which slot, where.

Pure policy over token indices (0, 1, 2, … of one sequence), used by the sink cache. The kept tokens
are the first `num_sink_tokens` and the last `window_length`; the newest counts into the window.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinkwise.errors import InputError


@dataclass(frozen=True)
class Retention:
    """The first S and the last W tokens of a sequence: S + W slots, the last W of them a ring.

    Token j < S has slot j, any other slot S + (j − S) mod W: a slot's content never moves, it is
    overwritten by the token W later.

    >>> Retention(num_sink_tokens=2, window_length=3).held(torch.tensor([7])).tolist()
    [[0, 1, 5, 6, 4]]

    Raises InputError for a negative S or a W below 1.

    Reference: Xiao et al., 2023, arXiv 2309.17453.
    """

    num_sink_tokens: int
    """S, first tokens that are kept for ever; 0 is a plain window."""
    window_length: int
    """W, most recent tokens that are kept, the newest (the query itself) included."""

    def __post_init__(self) -> None:
        for name, least in (("num_sink_tokens", 0), ("window_length", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(f"{name}={value!r} is not right: an integer of at least {least}")

    @property
    def capacity(self) -> int:
        """Slots: S + W."""
        return self.num_sink_tokens + self.window_length

    def slot(self, token: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """The slot of each token index."""
        sinks = self.num_sink_tokens
        return torch.where(token < sinks, token, sinks + (token - sinks) % self.window_length)

    def step(self, seen: int) -> tuple[int, int]:
        """Where the next token goes once `seen` have come, and how many slots are filled then."""
        sinks = self.num_sink_tokens
        slot = seen if seen < sinks else sinks + (seen - sinks) % self.window_length
        return slot, min(seen + 1, self.capacity)

    def held(self, seen: Int[Tensor, " batch"]) -> Int[Tensor, "batch slot"]:
        """The token that each slot holds once `seen` tokens have come; −1 for an empty slot."""
        slots = torch.arange(self.capacity)
        newest = seen[:, None] - 1
        back = (newest - slots) % self.window_length  # a ring slot's token stands this far back
        token = torch.where(slots < self.num_sink_tokens, slots, newest - back)
        return torch.where((token < slots) | (token > newest), -1, token)

    def visible(
        self, query: Int[Tensor, "*shape"], key: Int[Tensor, "*other"]
    ) -> Bool[Tensor, "*both"]:
        """Whether the query still has the key: not later, and a sink or among the last W."""
        recent = (key > query - self.window_length) | (key < self.num_sink_tokens)
        return recent & (key <= query) & (key >= 0)

    def shift(self, query: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """How many tokens between the sinks and the window are gone when the query is the newest:
        by so much nearer do the sinks stand than in the text.
        """
        return (query - (self.capacity - 1)).clamp(min=0)

    def place(
        self, query: Int[Tensor, "*shape"], key: Int[Tensor, "*other"]
    ) -> Int[Tensor, "*both"]:
        """The key's place in the cache, 0 … S + W − 1, when the query is the newest token."""
        return torch.where(key < self.num_sink_tokens, key, key - self.shift(query))

    def kept(self, seen: Int[Tensor, " batch"]) -> Int[Tensor, " batch"]:
        """Tokens in the cache after `seen` have come."""
        return seen.clamp(max=self.capacity)
