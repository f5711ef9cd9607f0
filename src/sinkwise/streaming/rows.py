"""Per row of a sink cache: real tokens so far, columns, and the base of its positions."""

from copy import deepcopy
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinkwise.core.retention import Retention
from sinkwise.errors import InputError
from sinkwise.streaming.plan import Tokens

REBASE_AFTER = 128
"""Least number of positions that a row may run ahead of the cache: re-basing, which rotates the
whole ring, is then rare enough to cost nothing."""


@dataclass(eq=False)
class Rows:
    """The counters of a batch; it has no rows before the first call."""

    retention: Retention
    seen: tuple[int, ...] | None = None
    """Real tokens of each row so far."""
    base: tuple[int, ...] = ()
    """Each row's token index minus its rotary position."""
    columns: int = 0
    """Columns of all calls, padding included, as `generate` counts them."""
    real: list[int | Bool[Tensor, "batch query"]] | None = field(default_factory=list)
    """For `crop`: which columns were real, or a number of columns that all were. None after the
    first eviction, even if the row that evicted a token has been dropped since.
    """

    @property
    def most(self) -> int:
        """Real tokens of the longest row."""
        return max(self.seen or (0,))

    @property
    def ahead(self) -> int:
        """Positions after which a full row is re-based."""
        return max(self.retention.window_length, REBASE_AFTER)

    def tokens(self, batch: int, length: int, real: Bool[Tensor, "batch query"] | None) -> Tokens:
        """The tokens of a call. Raises InputError if the number of rows has changed."""
        if self.seen is None:
            self.seen, self.base = (0,) * batch, (0,) * batch
        self.check(batch)
        return Tokens(self.seen, length, real)

    def check(self, batch: int) -> None:
        """Raise InputError if the cache holds another number of rows."""
        if self.seen is not None and len(self.seen) != batch:
            raise InputError(
                f"this call has {batch} rows and the cache holds {len(self.seen)}; give the same "
                "rows, or reset() the cache"
            )

    def rebase(self) -> Int[Tensor, " batch"] | None:
        """How many positions each row's keys must be rotated back; None if no row is far ahead.

        Afterwards the next query of each full row is at the last cache position.
        """
        assert self.seen is not None
        at = max(seen - base for seen, base in zip(self.seen, self.base, strict=True))
        if at < self.retention.capacity + self.ahead:
            return None
        base = self.retention.shift(torch.tensor(self.seen))
        back = base - torch.tensor(self.base)
        self.base = tuple(base.tolist())
        return back

    def count(self, tokens: Tokens, croppable: int) -> None:
        """Add a call's tokens; nothing is evicted up to `croppable` tokens."""
        self.seen = tokens.after
        self.columns += tokens.length
        if self.real is None:
            return
        if self.most > croppable:
            self.real = None
        elif tokens.real is not None:
            self.real.append(tokens.real)
        elif self.real and isinstance(self.real[-1], int):
            self.real[-1] += tokens.length
        else:
            self.real.append(tokens.length)

    def crop(self, stays: int) -> None:
        """Remove all columns except the first `stays`."""
        assert self.real is not None and self.seen is not None
        batch = len(self.seen)
        parts = [
            torch.ones(batch, part, dtype=torch.bool) if isinstance(part, int) else part
            for part in self.real
        ]
        real = torch.cat(parts, dim=1)[:, :stays]
        self.seen, self.columns, self.real = tuple(real.sum(1).tolist()), stays, [real]

    def select(self, chosen: Int[Tensor, " chosen"]) -> None:
        """Keep these rows, in this order."""
        assert self.seen is not None
        numbers = chosen.tolist()
        self.seen = tuple(self.seen[row] for row in numbers)
        self.base = tuple(self.base[row] for row in numbers)
        if self.real is not None:
            self.real = [part if isinstance(part, int) else part[chosen] for part in self.real]

    def copy(self) -> "Rows":
        """The same counters, counting on their own."""
        return deepcopy(self)
