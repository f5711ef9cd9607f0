"""The retention policy of a sink cache: which tokens of a growing sequence are kept, and where.

Pure functions of token indices (0, 1, 2, … of one sequence). The first `num_sink_tokens` and the
last `window_length` tokens are kept; the window includes the newest token.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinkwise.errors import InputError


@dataclass(frozen=True)
class Retention:
    r"""Keep the first $S$ and the last $W$ tokens of a sequence, in $S + W$ slots.

    After $n$ tokens these are tokens $0, …, S - 1$ (the sinks) and $n - W, …, n - 1$ (the window).
    Token $j$ is in slot $j$ if $j < S$, else in slot $S + (j - S) \bmod W$. The last $W$ slots are
    a ring: a token never moves, and token $j + W$ overwrites token $j$.

    Two sinks and a window of three, after tokens 0 … 6:

    >>> Retention(num_sink_tokens=2, window_length=3).held(torch.tensor([7])).tolist()
    [[0, 1, 5, 6, 4]]

    Raises InputError for a negative $S$ or a $W$ below 1.

    Reference: Xiao et al., 2023, arXiv 2309.17453.
    """

    num_sink_tokens: int
    """$S$, number of first tokens that are always kept; 0 gives a plain window."""
    window_length: int
    """$W$, number of most recent tokens that are kept, the newest (the query itself) included."""

    def __post_init__(self) -> None:
        for name, least in (("num_sink_tokens", 0), ("window_length", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(f"{name}={value!r} must be an integer of at least {least}")

    @property
    def capacity(self) -> int:
        """Number of slots, S + W."""
        return self.num_sink_tokens + self.window_length

    def slot(self, token: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """The slot of each token index."""
        sinks = self.num_sink_tokens
        return torch.where(token < sinks, token, sinks + (token - sinks) % self.window_length)

    def step(self, seen: int) -> tuple[int, int]:
        """The slot of the next token after `seen` tokens, and how many slots are filled then."""
        sinks = self.num_sink_tokens
        slot = seen if seen < sinks else sinks + (seen - sinks) % self.window_length
        return slot, min(seen + 1, self.capacity)

    def held(self, seen: Int[Tensor, " batch"]) -> Int[Tensor, "batch slot"]:
        """The token that each slot holds after `seen` tokens; −1 for an empty slot."""
        slots = torch.arange(self.capacity)
        newest = seen[:, None] - 1
        back = (newest - slots) % self.window_length  # how far back a ring slot's token is
        token = torch.where(slots < self.num_sink_tokens, slots, newest - back)
        return torch.where((token < slots) | (token > newest), -1, token)

    def visible(
        self, query: Int[Tensor, "*shape"], key: Int[Tensor, "*other"]
    ) -> Bool[Tensor, "*both"]:
        """Whether the query sees the key: it is not later, and a sink or among the last W."""
        recent = (key > query - self.window_length) | (key < self.num_sink_tokens)
        return recent & (key <= query) & (key >= 0)

    def shift(self, query: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """How many tokens between sinks and window are evicted when the query is the newest.

        The cache position of the sinks is nearer to the query than in the text by this number.
        """
        return (query - (self.capacity - 1)).clamp(min=0)

    def position(
        self, query: Int[Tensor, "*shape"], key: Int[Tensor, "*other"]
    ) -> Int[Tensor, "*both"]:
        """The key's cache position, 0 … S + W − 1, when the query is the newest token."""
        return torch.where(key < self.num_sink_tokens, key, key - self.shift(query))

    def kept(self, seen: Int[Tensor, " batch"]) -> Int[Tensor, " batch"]:
        """Number of tokens in the cache after `seen` tokens."""
        return seen.clamp(max=self.capacity)
