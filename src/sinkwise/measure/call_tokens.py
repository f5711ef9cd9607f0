"""Which of a call's queries and keys count, and what its keys are."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkwise.core.layout import name_first
from sinkwise.core.records import AttentionRecord


@dataclass(frozen=True, eq=False)
class CallTokens:
    """What the queries and keys of one call are."""

    codes: Int[Tensor, "batch key"]
    """The kind of each key, as a code of `KINDS`."""
    real_queries: Bool[Tensor, "batch query"] | None = None
    """False for padding, whose attention does not count; None: every query is real."""
    real_keys: Bool[Tensor, "batch key"] | None = None
    """False for padding, which is never a sink; None: every key is real."""
    final: bool = False
    """Kinds stay as they are: the first token of a causal call is not renamed to `first`."""

    @cached_property
    def causal_codes(self) -> Int[Tensor, "batch key"]:
        """`codes` for a causal call: `first` is named, unless the kinds are final."""
        return self.codes if self.final else name_first(self.codes)

    def num_queries(self, record: AttentionRecord) -> Float[Tensor, "batch 1 1"]:
        """Real queries of each sample."""
        if self.real_queries is None:
            shape = (record.q.shape[0], 1, 1)
            return torch.full(shape, float(record.q.shape[2]), device=record.q.device)
        return self.real_queries.sum(dim=-1)[:, None, None].to(torch.float32)

    def first_key(self, device: torch.device) -> Int[Tensor, " batch"]:
        """Position of each sample's first real key."""
        if self.real_keys is None:
            return torch.zeros(len(self.codes), dtype=torch.int64, device=device)
        return self.real_keys.to(torch.int8).argmax(dim=-1)
