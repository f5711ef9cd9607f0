"""Received attention: how much of everybody's attention each key gets, without the N x N map."""

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
class Seen:
    """How many queries can see each key, and what uniform attention would give it."""

    count: Float[Tensor, "batch seen_head key"]
    """Counted queries that can see the key (one row for all heads, unless the mask is per head)."""
    uniform: Float[Tensor, "batch seen_head key"]
    """Mean over those queries of 1 / (keys visible to the query); NaN for a key nobody sees."""


def row_lse(
    q: Float[Tensor, "batch head query head_dim"],
    k: Float[Tensor, "batch kv_head key head_dim"],
    *,
    scale: float,
    mask: AttentionMask = OPEN,
    softcap: float | None = None,
    sink_logit: Float[Tensor, "#batch #head #query"] | None = None,
) -> Float[Tensor, "batch head query"]:
    """log(sum_j exp(score_ij) + exp(sink_logit)); -inf for a query that sees nothing."""
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

    `tiles` recomputes the scores a cache-sized tile at a time; `flash` runs the attention kernel on
    the transposed problem, which suits a GPU and serves no softcap. `auto` chooses by the device.
    Where the kernel that ran kept its `lse`, passing it (sink logit included) saves one pass.
    Statistics are float32, or float64 for float64 inputs. Raises InputError for flash with softcap.
    """
    if method not in ("auto", "tiles", "flash"):
        raise InputError(f"method={method!r}; it is 'auto', 'tiles' or 'flash'")
    if method == "auto":
        method = "flash" if q.device.type == "cuda" and softcap is None else "tiles"
    if lse is None:
        lse = row_lse(q, k, scale=scale, mask=mask, softcap=softcap, sink_logit=sink_logit)
    # exp(score - inf) = 0 leaves out queries that see nothing, and those that do not count.
    shift = lse.to(statistics_dtype(q)).masked_fill(lse == -torch.inf, torch.inf)
    if counted is not None:
        shift = shift.masked_fill(~counted[:, None, :], torch.inf)
        q = q.masked_fill(~counted[:, None, :, None], 0.0)  # padding may hold NaN
    if method == "flash":
        if softcap is not None:
            raise InputError("method='flash' cannot serve a softcap; use method='tiles'")
        return Received(transposed_mass(q, k, shift, scale=scale, mask=mask), lse)
    batch, heads = q.shape[:2]
    kv_heads, keys = k.shape[1], k.shape[2]
    mass = shift.new_zeros(batch * kv_heads, heads // kv_heads, keys)
    for tile in score_tiles(q, k, scale=scale, mask=mask, softcap=softcap, shift=shift):
        mass[tile.pairs, :, tile.cols] += tile.scores.exp_().sum(dim=-2)
    return Received(mass.reshape(batch, heads, keys), lse)


def seen(
    mask: AttentionMask,
    shape: tuple[int, int, int],
    counted: Bool[Tensor, "batch query"] | None = None,
    device: torch.device | str = "cpu",
) -> Seen:
    """Who can see each key, from the mask alone; `shape` is (batch, query, key).

    Read `received - uniform` where the mask favours some keys: causal attention that knows nothing
    still gives key 0 the mean of 1/(i+1).
    """
    batch, queries, keys = shape
    device = torch.device(device)
    heads = max([1, *[t.shape[1] for t in (mask.allowed, mask.additive) if t is not None]])
    count = torch.zeros(batch, heads, keys, dtype=torch.float64, device=device)
    share = torch.zeros_like(count)
    weight = torch.ones(batch, queries, dtype=torch.float64, device=device)
    if counted is not None:
        weight = counted.to(device, torch.float64)
    step = max(1, min(queries, 4 * TILE_SCORES // (keys * heads * batch)))
    for start in range(0, queries, step):
        rows = range(start, min(start + step, queries))
        visible = visible_tile(mask, rows, range(keys), device).to(torch.float64)
        visible = visible.expand(-1, -1, len(rows), keys)
        each = weight[:, None, None, rows.start : rows.stop]
        keys_of_row = visible.sum(dim=-1).clamp_min(1)[..., None, :]
        count += torch.matmul(each, visible)[..., 0, :]
        share += torch.matmul(each / keys_of_row, visible)[..., 0, :]
    return Seen(count, share / count)
