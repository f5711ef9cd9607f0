"""The self-check: whether a record reproduces what the model computed."""

import torch
from torch import Tensor

from sinkwise.attention.mask import bias_tile
from sinkwise.attention.reference import attention
from sinkwise.core.records import OPEN, AttentionMask, AttentionRecord
from sinkwise.errors import CaptureError

CHECKED_ROWS = 8
"""Queries at each end of the sequence that are recomputed."""


@torch.no_grad()
def verify(record: AttentionRecord) -> None:
    """Recompute some rows of the output from the record's own fields."""
    queries = record.q.shape[2]
    dtype = torch.float64 if record.q.dtype == torch.float64 else torch.float32
    tolerance = 2e-2 if record.out.dtype.itemsize == 2 else 1e-4
    rounding = torch.finfo(record.out.dtype).eps * float(record.v.abs().nan_to_num(0.0, 0.0).amax())
    for rows in (range(min(CHECKED_ROWS, queries)), range(max(0, queries - CHECKED_ROWS), queries)):
        part = slice(rows.start, rows.stop)
        own = record.out[:, :, part].to(dtype)
        recomputed, visible = _recomputed(record, rows, dtype)
        visible = visible & torch.isfinite(own).all(dim=-1, keepdim=True)
        limit = tolerance * float((own * visible).nan_to_num(0.0).abs().max()) + rounding

        def largest_error(other: Tensor, own: Tensor = own, visible: Tensor = visible) -> float:
            return float((own - other).abs().masked_fill(~visible, 0.0).max())

        difference = largest_error(recomputed)
        if difference <= limit:
            continue
        if record.weights is not None:
            group = record.v.repeat_interleave(record.group, dim=1).to(dtype)
            difference = largest_error(record.weights[:, :, part].to(dtype) @ group)
            if difference <= limit:
                record.faithful = False  # only the map, the model's own, is right
                return
        raise CaptureError(
            f"{record.name or 'the model'} (layer {record.layer}): the output recomputed from the "
            f"captured record differs from the model's by {difference:.3g} (allowed {limit:.3g})"
        )


def _recomputed(record: AttentionRecord, rows: range, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The output of some rows, and which of them see a key (where none is, kernels differ)."""
    part = slice(rows.start, rows.stop)
    bias = bias_tile(record.mask, rows, range(record.k.shape[2]), dtype, record.q.device)
    sink = record.sink_logit
    if sink is not None and sink.shape[2] > 1:
        sink = sink[:, :, part]
    out = attention(
        record.q[:, :, part],
        record.k,
        record.v,
        scale=record.scale,
        softcap=record.softcap,
        mask=OPEN if bias is None else AttentionMask(additive=bias),
        sink_logit=sink,
    ).out
    visible = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=record.q.device)
    if bias is not None:
        visible = (bias > -torch.inf).any(dim=-1, keepdim=True)
    return out, visible
