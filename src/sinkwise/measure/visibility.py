"""How many queries see each key of a call, and whether the call is causal."""

from jaxtyping import Bool, Float
from torch import Tensor

from sinkwise.attention.received import VisibilityCounts, visibility_counts
from sinkwise.core.records import AttentionMask, AttentionRecord

CACHED_MASKS = 4
"""Masks whose counts are remembered; the layers of a model use one to three different masks."""


class VisibilityCache:
    """Visibility counts of recent masks: layers share their mask, so each is counted once."""

    def __init__(self) -> None:
        self._entries: list[
            tuple[AttentionMask, tuple[int, int, int], object, VisibilityCounts]
        ] = []

    def __len__(self) -> int:
        return len(self._entries)

    def counts(
        self, record: AttentionRecord, real_queries: Bool[Tensor, "batch query"] | None
    ) -> VisibilityCounts:
        """Visibility counts of the call's mask, over the queries that are no padding."""
        mask = record.mask
        if not record.faithful and record.weights is not None and mask.is_open:
            mask = AttentionMask(allowed=visible_in_map(record.weights))
        shape = (record.q.shape[0], record.q.shape[2], record.k.shape[2])
        for known, size, queries, result in self._entries:
            if size == shape and queries is real_queries and same_mask(known, mask):
                return result
        result = visibility_counts(mask, shape, real_queries, record.q.device)
        entry = (mask, shape, real_queries, result)
        self._entries = [entry, *self._entries[: CACHED_MASKS - 1]]
        return result

    def clear(self) -> None:
        """Forget all masks, as the tensors of a batch must not outlive it."""
        self._entries.clear()


def visible_in_map(
    weights: Float[Tensor, "batch head query key"],
) -> Bool[Tensor, "batch 1 query key"]:
    """Which keys each query sees, from the attention map alone.

    A key that receives nothing at all is not masked: its weights underflow beside a strong sink. A
    triangle of zeros is a causal mask.
    """
    visible = (weights > 0).any(dim=1, keepdim=True)
    underflown = ~visible.any(dim=-2, keepdim=True)
    causal = not bool(visible.triu(1).any()) and not bool(visible.tril(-1).logical_not().all())
    return visible | (underflown.expand_as(visible).tril() if causal else underflown)


def same_mask(one: AttentionMask, other: AttentionMask) -> bool:
    """Whether two masks have equal numbers and share their tensors."""
    tensors = ("positions", "allowed", "additive")
    return (one.causal, one.offset, one.window) == (other.causal, other.offset, other.window) and (
        all(getattr(one, name) is getattr(other, name) for name in tensors)
    )


def is_causal(counts: VisibilityCounts, real_keys: Bool[Tensor, "batch key"] | None) -> bool:
    """True where only one query sees the last real key, and more than one the first."""
    count = counts.count[0, 0]
    if real_keys is not None:
        longest = int(real_keys.sum(dim=-1).argmax())  # a sample of one token would not tell
        count = counts.count[longest, 0][real_keys[longest]]
    return len(count) > 1 and bool(count[-1] <= 1 < count[0])
