"""Single columns of the attention map: the attention that one key receives, in O(N)."""

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from sinkwise.attention.mask import is_hidden
from sinkwise.attention.tiles import statistics_dtype
from sinkwise.core.records import OPEN, AttentionMask


def columns(
    q: Float[Tensor, "batch head query head_dim"],
    k: Float[Tensor, "batch kv_head key head_dim"],
    lse: Float[Tensor, "batch head query"],
    *,
    scale: float,
    batch: Int[Tensor, " event"],
    head: Int[Tensor, " event"],
    key: Int[Tensor, " event"],
    mask: AttentionMask = OPEN,
    softcap: float | None = None,
) -> Float[Tensor, "event query"]:
    """A_is = exp(score_is - lse_i) of each given (sample, head, key); 0 where s is masked."""
    dtype = statistics_dtype(q)
    group = q.shape[1] // k.shape[1]
    keys = k[batch, head // group, key].to(dtype)
    scores = torch.einsum("eqd,ed->eq", q[batch, head].to(dtype), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    rows = lse[batch, head].to(dtype)
    if mask.additive is not None:
        scores = scores + column_of(mask.additive, batch, head, key, q.shape[2]).to(dtype)
    visible = visible_column(mask, batch, head, key, q.shape[2])
    scores = (scores - rows.masked_fill(rows == -torch.inf, 0.0)).masked_fill(~visible, -torch.inf)
    return torch.exp(scores)


def column_of(
    tensor: Tensor, batch: Tensor, head: Tensor, key: Tensor, queries: int
) -> Shaped[Tensor, "event query"]:
    """The given columns of a broadcastable [batch head query key] tensor."""
    sizes = tensor.shape
    index = [
        part if size > 1 else torch.zeros_like(part)
        for part, size in zip((batch, head, key), (sizes[0], sizes[1], sizes[3]), strict=True)
    ]
    return tensor[index[0], index[1], :, index[2]].expand(-1, queries)


def visible_column(
    mask: AttentionMask,
    batch: Int[Tensor, " event"],
    head: Int[Tensor, " event"],
    key: Int[Tensor, " event"],
    queries: int,
) -> Bool[Tensor, "event query"]:
    """Which queries can see each given key."""
    query = mask.positions_of(range(queries), key.device)[None, :]
    visible = torch.ones(len(key), queries, dtype=torch.bool, device=key.device)
    if mask.causal:
        visible &= key[:, None] <= query
        if mask.window is not None:
            visible &= key[:, None] > query - mask.window
    if mask.allowed is not None:
        visible &= column_of(mask.allowed, batch, head, key, queries)
    if mask.additive is not None:
        visible &= ~is_hidden(column_of(mask.additive, batch, head, key, queries))
    return visible
