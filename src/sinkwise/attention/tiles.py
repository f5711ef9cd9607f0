"""Scores of an attention call, in tiles that fit the CPU's cache."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from sinkwise.attention.mask import bias_tile, biased_keys, key_range
from sinkwise.core.records import AttentionMask

TILE_SCORES = 2**18
"""Scores per tile and thread: 1 MiB of float32, which fits a core's L2 cache."""


def statistics_dtype(tensor: Tensor) -> torch.dtype:
    """float64 for float64 tensors, else float32, whatever precision the model uses."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


class Tile(NamedTuple):
    """Scores of some heads, queries and keys. A pair is one key/value head of one sample."""

    pairs: slice
    rows: slice
    cols: slice
    scores: Float[Tensor, "pair group row col"]
    """Masked scores, minus `shift` if given; a buffer that the consumer may overwrite."""


def score_tiles(
    q: Float[Tensor, "batch head query head_dim"],
    k: Float[Tensor, "batch kv_head key head_dim"],
    *,
    scale: float,
    mask: AttentionMask,
    softcap: float | None,
    shift: Float[Tensor, "batch head query"] | None = None,
) -> Iterator[Tile]:
    """Tiles of q k^T * scale (soft-capped, masked) - shift, without keys that no query sees.

    The keys of grouped heads are not repeated. Without a softcap, the shift is one more column of
    q, so that subtracting it takes no pass over the scores.
    """
    dtype = statistics_dtype(q)
    batch, heads, queries, width = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    group, pairs = heads // kv_heads, batch * kv_heads
    extra = int(shift is not None and softcap is None)
    rows_of_q = q.new_empty(batch, kv_heads, group, queries, width + extra, dtype=dtype)
    # Cast before scaling: in half precision the product would lose bits.
    wide = q.to(dtype).reshape(*rows_of_q.shape[:4], width)
    torch.mul(wide, scale, out=rows_of_q[..., :width])
    cols_of_k = k.new_empty(batch, kv_heads, keys, width + extra, dtype=dtype)
    cols_of_k[..., :width] = k
    if shift is not None:
        shift = shift.reshape(pairs, group, queries, 1)
    if shift is not None and extra:
        rows_of_q[..., width] = -shift.reshape(rows_of_q.shape[:4])
        cols_of_k[..., width] = 1
    rows_of_q, cols_of_k = rows_of_q.flatten(0, 1), cols_of_k.flatten(0, 1)

    budget = TILE_SCORES * torch.get_num_threads()
    tile_rows = max(1, min(queries, budget // (group * keys)))
    tile_pairs = max(1, budget // (tile_rows * group * keys))
    for first_row in range(0, queries, tile_rows):
        rows = range(first_row, min(first_row + tile_rows, queries))
        cols = key_range(mask, rows, keys)
        if not cols:
            continue
        some = biased_keys(mask, rows, cols)
        bias = bias_tile(mask, rows, some, dtype, q.device) if some else None
        r, c = slice(rows.start, rows.stop), slice(cols.start, cols.stop)
        for first in range(0, pairs, tile_pairs):
            p = slice(first, min(first + tile_pairs, pairs))
            left = rows_of_q[p, :, r].flatten(1, 2)
            scores = torch.bmm(left, cols_of_k[p, c].mT).view(-1, group, len(rows), len(cols))
            if softcap is not None:
                scores.div_(softcap).tanh_().mul_(softcap)
                if shift is not None:
                    scores -= shift[p, :, r]
            if bias is not None:
                scores[..., some.start - cols.start :] += _bias_of_pairs(bias, p, kv_heads, group)
            yield Tile(p, r, c, scores)


def _bias_of_pairs(bias: Tensor, pairs: slice, kv_heads: int, group: int) -> Tensor:
    """The bias of some pairs: [#pair #group query key] from [#batch #head query key]."""
    if bias.shape[0] == bias.shape[1] == 1:
        return bias
    index = torch.arange(pairs.start, pairs.stop, device=bias.device)
    sample = index // kv_heads if bias.shape[0] > 1 else torch.zeros_like(index)
    if bias.shape[1] == 1:
        return bias[sample]
    heads = (index % kv_heads)[:, None] * group + torch.arange(group, device=bias.device)
    return bias[sample[:, None], heads]
