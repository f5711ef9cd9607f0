"""Received attention from the attention kernel itself, run on the transposed problem."""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from sinkwise.attention.mask import bias_tile
from sinkwise.core.records import AttentionMask

KEYS_PER_CHUNK = 1024
"""Keys per chunk of the bias that replaces the kernel's own causal mask."""


def transposed_mass(
    q: Float[Tensor, "batch head query head_dim"],
    k: Float[Tensor, "batch kv_head key head_dim"],
    shift: Float[Tensor, "batch head query"],
    *,
    scale: float,
    mask: AttentionMask,
) -> Float[Tensor, "batch head key"]:
    """sum_i exp(score_ij - shift_i), as the exponential of a kernel's log-sum-exp over queries.

    With query <- [k, 1] and key <- [q, -shift / scale], the scaled product is the shifted score,
    transposed. Square causal attention stays causal if both sequences are flipped. In half
    precision the shift is split over three columns, to keep the bits that the exponential needs.
    """
    kv_heads = k.shape[1]
    if q.shape[1] > kv_heads:
        # One head of each group at a time, so that the shared keys are not repeated.
        group = q.shape[1] // kv_heads
        parts = [
            transposed_mass(
                q[:, member::group],
                k,
                shift[:, member::group],
                scale=scale,
                mask=_member(mask, member, group),
            )
            for member in range(group)
        ]
        return torch.stack(parts, dim=2).flatten(1, 2)
    queries, width = q.shape[2:]
    keys = k.shape[2]
    dtype = q.dtype
    # A finite floor: -inf times a zero of the split, or minus itself, would be NaN.
    floor = -30000.0 if dtype == torch.float16 else torch.finfo(dtype).min / 8
    columns = _split((-shift / scale).clamp(min=floor), dtype)
    pad = -(width + len(columns)) % 8
    left = F.pad(F.pad(k, (0, len(columns)), value=1.0), (0, pad))
    right = F.pad(torch.cat([q, *(c[..., None] for c in columns)], dim=-1), (0, pad))
    if mask.is_open:
        return kernel_lse(left, right, scale=scale).exp()
    plain = mask.positions is None and mask.offset == 0 and mask.window is None
    if plain and queries == keys and mask.allowed is None and mask.additive is None:
        lse = kernel_lse(left.flip(2), right.flip(2), scale=scale, causal=True)
        return lse.flip(2).exp()
    chunks = []
    for start in range(0, keys, KEYS_PER_CHUNK):
        cols = range(start, min(start + KEYS_PER_CHUNK, keys))
        bias = bias_tile(mask, range(queries), cols, right.dtype, q.device)
        if bias is not None:
            bias = bias.mT.clamp(min=floor).expand(-1, -1, len(cols), queries)
        part = left[:, :, cols.start : cols.stop]
        chunks.append(kernel_lse(part, right, scale=scale, bias=bias))
    return torch.cat(chunks, dim=-1).exp()


def _member(mask: AttentionMask, member: int, group: int) -> AttentionMask:
    """The mask of head number `member` of every group."""
    allowed, additive = (
        t[:, member::group] if t is not None and t.shape[1] > 1 else t
        for t in (mask.allowed, mask.additive)
    )
    return replace(mask, allowed=allowed, additive=additive)


def _split(values: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Tensors of `dtype` with sum `values`, almost exactly: one, or three in half precision."""
    parts: list[Tensor] = []
    rest = values
    for _ in range(1 if dtype.itemsize >= 4 else 3):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].to(rest.dtype)
    return parts


def kernel_lse(
    q: Float[Tensor, "batch head query head_dim"],
    k: Float[Tensor, "batch head key head_dim"],
    *,
    scale: float,
    bias: Float[Tensor, "#batch #head query key"] | None = None,
    causal: bool = False,
) -> Float[Tensor, "batch head query"]:
    """Log-sum-exp of each row of q k^T * scale + bias, from the device's fused kernel."""
    aten = torch.ops.aten
    if q.device.type == "cpu":
        run = aten._scaled_dot_product_flash_attention_for_cpu
        lse = run(q, k, k, 0.0, causal, attn_mask=bias, scale=scale)[1]
    elif bias is None and q.dtype.itemsize == 2:
        lse = aten._scaled_dot_product_flash_attention(q, k, k, 0.0, causal, scale=scale)[1]
    else:
        if bias is not None:
            # The kernel needs rows that start at multiples of 16 bytes.
            bias = F.pad(bias, (0, -k.shape[2] % 8))[..., : k.shape[2]]
            bias = bias.expand(q.shape[0], q.shape[1], -1, -1)
        run = aten._scaled_dot_product_efficient_attention
        lse = run(q, k, k, bias, True, 0.0, causal, scale=scale)[1]
    return lse[..., : q.shape[2]]
