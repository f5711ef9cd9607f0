"""Received attention: how much attention each key gets from the queries, without the N x N map."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinkwise.attention.mask import visible_tile
from sinkwise.attention.tiles import TILE_SCORES, score_tiles, statistics_dtype
from sinkwise.attention.transposed import transposed_mass
from sinkwise.core.records import OPEN, AttentionMask
from sinkwise.errors import InputError


class Received(NamedTuple):
    """Column sums of the attention map, and the log-sum-exp of its rows."""

    mass: Float[Tensor, "batch head key"]
    """Sum of A_ij over the counted queries i, 0 to the number of queries."""
    lse: Float[Tensor, "batch head query"]


@dataclass(frozen=True, eq=False)
class VisibilityCounts:
    """How many queries can see each key, and what uniform attention would give it."""

    count: Float[Tensor, "batch mask_head key"]
    """Counted queries that can see the key; `mask_head` is 1 unless the mask differs per head."""
    uniform: Float[Tensor, "batch mask_head key"]
    """Mean over those queries of 1 / (keys visible to the query); NaN for a key that none sees."""


def row_lse(
    q: Float[Tensor, "batch head query head_dim"],
    k: Float[Tensor, "batch kv_head key head_dim"],
    *,
    scale: float,
    mask: AttentionMask = OPEN,
    softcap: float | None = None,
    sink_logit: Float[Tensor, "#batch #head #query"] | None = None,
) -> Float[Tensor, "batch head query"]:
    """log(sum_j exp(score_ij) + exp(sink_logit)); -inf for a query that sees no key."""
    batch, heads, queries, _ = q.shape
    kv_heads = k.shape[1]
    shape = (batch * kv_heads, heads // kv_heads, queries)
    lse = q.new_full(shape, -torch.inf, dtype=statistics_dtype(q))
    for tile in score_tiles(q, k, scale=scale, mask=mask, softcap=softcap):
        lse[tile.pairs, :, tile.rows] = torch.logsumexp(tile.scores, dim=-1)
    lse = lse.reshape(batch, heads, queries)
    if sink_logit is not None:
        lse = torch.logaddexp(lse, sink_logit.to(lse.dtype).expand_as(lse))
    return lse


def received_mass(
    q: Float[Tensor, "batch head query head_dim"],
    k: Float[Tensor, "batch kv_head key head_dim"],
    *,
    scale: float,
    mask: AttentionMask = OPEN,
    softcap: float | None = None,
    sink_logit: Float[Tensor, "#batch #head #query"] | None = None,
    lse: Float[Tensor, "batch head query"] | None = None,
    counted: Bool[Tensor, "batch query"] | None = None,
    method: Literal["auto", "tiles", "flash"] = "auto",
) -> Received:
    """mass_j = sum over counted queries i of A_ij = exp(score_ij - lse_i), in O(N) memory.

    counted: queries whose attention counts, those that are no padding; None: all.
    lse: the log-sum-exp that the attention kernel kept (sink logit included); it saves one pass.
    method: `tiles` recomputes the scores in tiles that fit the cache; `flash` runs the attention
    kernel on the transposed problem, which suits a GPU and does not support a softcap; `auto`
    chooses by device.

    Statistics are float32, or float64 for float64 inputs. Raises InputError for an unknown method
    and for `flash` with a softcap.
    """
    if method not in ("auto", "tiles", "flash"):
        raise InputError(f"method={method!r} must be 'auto', 'tiles' or 'flash'")
    if method == "auto":
        method = "flash" if q.device.type == "cuda" and softcap is None else "tiles"
    if lse is None:
        lse = row_lse(q, k, scale=scale, mask=mask, softcap=softcap, sink_logit=sink_logit)
    # exp(score - inf) = 0 excludes queries that see no key and those that are not counted.
    shift = lse.to(statistics_dtype(q)).masked_fill(lse == -torch.inf, torch.inf)
    if counted is not None:
        shift = shift.masked_fill(~counted[:, None, :], torch.inf)
        q = q.masked_fill(~counted[:, None, :, None], 0.0)  # padding may hold NaN
    if method == "flash":
        if softcap is not None:
            raise InputError("method='flash' does not support a softcap; use method='tiles'")
        return Received(transposed_mass(q, k, shift, scale=scale, mask=mask), lse)
    batch, heads = q.shape[:2]
    kv_heads, keys = k.shape[1], k.shape[2]
    mass = shift.new_zeros(batch * kv_heads, heads // kv_heads, keys)
    for tile in score_tiles(q, k, scale=scale, mask=mask, softcap=softcap, shift=shift):
        mass[tile.pairs, :, tile.cols] += tile.scores.exp_().sum(dim=-2)
    return Received(mass.reshape(batch, heads, keys), lse)


def visibility_counts(
    mask: AttentionMask,
    shape: tuple[int, int, int],
    counted: Bool[Tensor, "batch query"] | None = None,
    device: torch.device | str = "cpu",
) -> VisibilityCounts:
    """Visibility counts of each key, from the mask alone; `shape` is (batch, query, key).

    Compare received attention with `uniform` where the mask favours some keys: uniform causal
    attention gives key 0 the mean of 1/(i+1).
    """
    batch, queries, keys = shape
    device = torch.device(device)
    heads = max([1, *[t.shape[1] for t in (mask.allowed, mask.additive) if t is not None]])
    count = torch.zeros(batch, heads, keys, dtype=torch.float64, device=device)
    shares = torch.zeros_like(count)
    weight = torch.ones(batch, queries, dtype=torch.float64, device=device)
    if counted is not None:
        weight = counted.to(device, torch.float64)
    step = max(1, min(queries, 4 * TILE_SCORES // (keys * heads * batch)))
    for start in range(0, queries, step):
        rows = range(start, min(start + step, queries))
        visible = visible_tile(mask, rows, range(keys), device).to(torch.float64)
        visible = visible.expand(-1, -1, len(rows), keys)
        row_weight = weight[:, None, None, rows.start : rows.stop]
        visible_keys = visible.sum(dim=-1).clamp_min(1)[..., None, :]
        count += torch.matmul(row_weight, visible)[..., 0, :]
        shares += torch.matmul(row_weight / visible_keys, visible)[..., 0, :]
    return VisibilityCounts(count, shares / count)
