"""Tensors of consecutive generation steps, joined along their queries."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sinkwise.core.records import AttentionRecord


def among_all_keys(part: Tensor, base: int, total: int, empty: float | bool) -> Tensor:
    """A step's [.. query key] among all `total` keys: those outside of its cache are `empty`."""
    whole = part.new_full((*part.shape[:3], total), empty)
    stop = min(total, base + part.shape[3])
    whole[..., base:stop] = part[..., : stop - base]
    return whole


def concatenated_maps(parts: Sequence[Tensor]) -> Tensor:
    """[batch head query key] of all queries; batch and head axes of 1 are expanded."""
    batch, heads = (max(part.shape[axis] for part in parts) for axis in (0, 1))
    return torch.cat([part.expand(batch, heads, -1, -1) for part in parts], dim=2)


def concatenated(parts: Sequence[Tensor | None], axis: int) -> Tensor | None:
    """All parts, or None where one is missing."""
    known = [part for part in parts if part is not None]
    return torch.cat(known, dim=axis) if len(known) == len(parts) else None


def concatenated_sinks(records: Sequence[AttentionRecord]) -> Tensor | None:
    """The sink logits of all queries; one per head where all are equal, as learned ones are."""
    if records[0].sink_logit is None:
        return None
    batch, heads = records[0].q.shape[:2]
    parts = []
    for record in records:
        assert record.sink_logit is not None
        parts.append(record.sink_logit.detach().expand(batch, heads, record.q.shape[2]))
    whole = torch.cat(parts, dim=2)
    same = bool((whole == whole[:1, :, :1]).all())
    return whole[:1, :, :1].clone() if same else whole
