"""A sink logit as one more key, for F.scaled_dot_product_attention on any device."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from sinkwise.errors import InputError

LOWEST = -3e4
"""Lower sink logits are raised to this: -inf times the 0 of the other keys would be NaN. Beside any
key the logit takes a share of exp(-30000) = 0, and a query without keys still gets 0."""

_ALIGNMENT = 8
"""Kernels need a multiple of this many channels."""


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
    """Attention with a first key of value zero whose score is the sink, through extra channels.

    It comes first because in a causal kernel every query sees the first key, once an unused query
    precedes the others. Raises InputError for a scale of 0, with which no key has a score.
    """
    if scale == 0:
        raise InputError("scale=0 leaves no score to the sink in form='column'; use form='rescale'")
    head_dim, value_dim = q.shape[-1], v.shape[-1]
    # 1 / scale is split over two channels, so that half precision does not round the logit twice.
    extra = 2 + (-head_dim - 2) % _ALIGNMENT
    high = torch.tensor(1 / scale, dtype=q.dtype)
    unit = torch.tensor([float(high), 1 / scale - float(high)], dtype=q.dtype, device=q.device)
    logit = sink.to(q.dtype).clamp(min=LOWEST)[:, None, None].expand(*q.shape[:3], 2)
    query = F.pad(torch.cat([q, logit], dim=-1), (0, extra - 2, int(is_causal), 0))
    row = F.pad(unit, (head_dim, extra - 2)).expand(*k.shape[:2], 1, -1)
    key = torch.cat([row, F.pad(k, (0, extra))], dim=2)
    # The CPU kernel needs values as wide as keys.
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
