"""A sink logit as one more key: through F.scaled_dot_product_attention, on any device."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from sinkwise.errors import InputError

LOWEST = -3e4
"""A sink logit below this is put here: -inf times the 0 of the other keys would be no number.
Beside a key it takes exp(-30000) = 0, and a query without keys still gets 0."""

_ALIGNMENT = 8
"""Kernels want a multiple of this many channels."""


def column(
    q: Float[Tensor, "batch head query head_dim"],
    k: Float[Tensor, "batch kv_head key head_dim"],
    v: Float[Tensor, "batch kv_head key value_dim"],
    sink: Float[Tensor, " head"],
    bias: Float[Tensor, "#batch #head #query key"] | None,
    is_causal: bool,
    scale: float,
    dropout_p: float,
) -> Float[Tensor, "batch head query value_dim"]:
    """One more key in front, of value zero, whose score is the sink: its own channels see to that.

    In front, because a causal kernel lets every query see the first key once a query that nobody
    reads goes before the others. Raises InputError for a scale of 0, which leaves no score to it.
    """
    if scale == 0:
        raise InputError("scale=0 leaves no score to the sink in form='column'")
    head_dim, value_dim = q.shape[-1], v.shape[-1]
    # Two channels: 1 / scale in two parts, so that half precision does not round the logit twice.
    extra = 2 + (-head_dim - 2) % _ALIGNMENT
    high = torch.tensor(1 / scale, dtype=q.dtype)
    unit = torch.tensor([float(high), 1 / scale - float(high)], dtype=q.dtype, device=q.device)
    logit = sink.to(q.dtype).clamp(min=LOWEST)[:, None, None].expand(*q.shape[:3], 2)
    query = F.pad(torch.cat([q, logit], dim=-1), (0, extra - 2, int(is_causal), 0))
    row = F.pad(unit, (head_dim, extra - 2)).expand(*k.shape[:2], 1, -1)
    key = torch.cat([row, F.pad(k, (0, extra))], dim=2)
    # The CPU kernel wants values as wide as keys.
    value = F.pad(v, (0, extra if value_dim == head_dim else 0, 1, 0))
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if bias is None else F.pad(bias, (1, 0)),
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[:, :, int(is_causal) :, :value_dim]
