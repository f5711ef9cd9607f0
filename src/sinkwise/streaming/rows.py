"""How far each row of a sink cache has come: real tokens, columns, and the positions' base."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinkwise.core.retention import Retention
from sinkwise.errors import InputError
from sinkwise.streaming.plan import Tokens

REBASE_AFTER = 128
"""Positions by which a row may run ahead, where the window is shorter: rarely enough that turning
the ring back costs nothing."""


@dataclass(eq=False)
class Rows:
    """The counts of a batch; before the first call it has no rows."""

    retention: Retention
    seen: tuple[int, ...] | None = None
    """Real tokens that each row has had."""
    base: tuple[int, ...] = ()
    """What each row's token index is ahead of its rotary position."""
    columns: int = 0
    """Columns of all calls, padding included: what `generate` counts."""
    real: list[int | Bool[Tensor, "batch query"]] | None = field(default_factory=list)
    """Which columns were real, for `crop`, a number of columns where all were; None from the first
    eviction on, also where the row that it befell has gone since.
    """

    @property
    def most(self) -> int:
        """Real tokens of the row that has had most."""
        return max(self.seen or (0,))

    @property
    def ahead(self) -> int:
        """Positions after which a full row is brought back."""
        return max(self.retention.window_length, REBASE_AFTER)

    def tokens(self, batch: int, length: int, real: Bool[Tensor, "batch query"] | None) -> Tokens:
        """The tokens of a call.

        Raises InputError for another number of rows than before.
        """
        if self.seen is None:
            self.seen, self.base = (0,) * batch, (0,) * batch
        self.check(batch)
        return Tokens(self.seen, length, real)

    def check(self, batch: int) -> None:
        """Raise InputError for another number of rows than the cache has."""
        if self.seen is not None and len(self.seen) != batch:
            raise InputError(
                f"this call has {batch} rows and the cache holds {len(self.seen)}: give the same "
                "rows, or reset() the cache"
            )

    def rebase(self) -> Int[Tensor, " batch"] | None:
        """By how many positions each row's keys are to be turned back; None while none has run
        too far ahead.

        A row is brought to where its next query stands at the last place of the cache; one that is
        not full stands there already.
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
        """Add a call's tokens; `croppable`: up to how many nothing has been evicted."""
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
        """Take all columns back but the first `stays`."""
        assert self.real is not None and self.seen is not None
        batch = len(self.seen)
        parts = [
            torch.ones(batch, part, dtype=torch.bool) if isinstance(part, int) else part
            for part in self.real
        ]
        real = torch.cat(parts, dim=1)[:, :stays]
        self.seen, self.columns, self.real = tuple(real.sum(1).tolist()), stays, [real]

    def select(self, chosen: Int[Tensor, " chosen"]) -> None:
        """Only these rows, in this order."""
        assert self.seen is not None
        numbers = chosen.tolist()
        self.seen = tuple(self.seen[row] for row in numbers)
        self.base = tuple(self.base[row] for row in numbers)
        if self.real is not None:
            self.real = [part if isinstance(part, int) else part[chosen] for part in self.real]
