"""Softmax attention with every option, written plainly: the specification of all fast paths."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from sinkwise.attention.mask import bias_tile, visibility
from sinkwise.core.records import OPEN, AttentionMask

__all__ = ["Attention", "attention", "visibility"]


class Attention(NamedTuple):
    """Output, log-sum-exp and map of one attention call."""

    out: Float[Tensor, "batch head query value_dim"]
    lse: Float[Tensor, "batch head query"]
    weights: Float[Tensor, "batch head query key"]


def attention(
    q: Float[Tensor, "batch head query head_dim"],
    k: Float[Tensor, "batch kv_head key head_dim"],
    v: Float[Tensor, "batch kv_head key value_dim"],
    *,
    scale: float,
    softcap: float | None = None,
    mask: AttentionMask = OPEN,
    sink_logit: Float[Tensor, "#batch #head #query"] | None = None,
) -> Attention:
    """out = softmax(cap(q k^T * scale) + mask, with exp(sink_logit) in the denominator) v.

    cap(x) = softcap * tanh(x / softcap). Computed in float64 for float64 inputs, else in float32.
    A query that sees no key has weights and output 0; its lse is the sink logit, or -inf.
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[1] // k.shape[1]
    key = k.to(dtype).repeat_interleave(group, dim=1)
    value = v.to(dtype).repeat_interleave(group, dim=1)
    scores = q.to(dtype) @ key.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    bias = bias_tile(mask, range(q.shape[2]), range(k.shape[2]), dtype, q.device)
    if bias is not None:
        scores = scores + bias
    lse = torch.logsumexp(scores, dim=-1)
    if sink_logit is not None:
        lse = torch.logaddexp(lse, sink_logit.to(dtype).expand_as(lse))
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return Attention(weights @ value, lse, weights)
