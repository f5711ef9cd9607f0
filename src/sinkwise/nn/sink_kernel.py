"""A sink logit in the forward and backward passes of torch's CPU attention kernel."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def refusal(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, dropout_p: float
) -> str | None:
    """Why torch's CPU kernel does not support this call, or None if it does."""
    if q.device.type != "cpu":
        return f"runs only on a CPU, and q is on {q.device}"
    if dropout_p:
        return f"has no dropout, and dropout_p={dropout_p} was given"
    if q.shape[-1] != v.shape[-1]:
        return f"needs values as wide as keys, and v has {v.shape[-1]} channels, k {k.shape[-1]}"
    if attn_mask is not None and attn_mask.requires_grad:
        return "computes no gradient for attn_mask, which requires one"
    if q.numel() == 0 or k.numel() == 0:
        return "needs at least one query and one key"
    if q.dtype not in _DTYPES:
        return f"does not support {q.dtype}"
    return None


class RescaledAttention(torch.autograd.Function):
    r"""Softmax attention with exp(sink) in the denominator, without an attention map.

    The kernel returns $\mathrm{out}$ and $\mathrm{lse}$. With
    $\mathrm{out}' = \mathrm{out} \cdot \sigma(\mathrm{lse} - \mathrm{sink})$ and
    $\mathrm{lse}' = \log(e^{\mathrm{lse}} + e^{\mathrm{sink}})$, its own backward pass is exact: it
    recomputes $P' = e^{s - \mathrm{lse}'}$ and $dS = P' \odot (dO\, V^\top - dO \cdot
    \mathrm{out}')$. The sink, whose value is zero, gets $-e^{\mathrm{sink} - \mathrm{lse}'} \,
    dO \cdot \mathrm{out}'$. The sink therefore costs two passes over the output and no product.

    For a query without keys the kernel returns output 0 and lse 0, which makes every gradient 0.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Float[Tensor, "batch head query head_dim"],
        k: Float[Tensor, "batch kv_head key head_dim"],
        v: Float[Tensor, "batch kv_head key head_dim"],
        sink: Float[Tensor, " head"],
        bias: Float[Tensor, "#batch #head #query key"] | None,
        is_causal: bool,
        scale: float,
    ) -> Float[Tensor, "batch head query head_dim"]:
        out, lse = _forward(q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale)
        logit = sink.to(lse.dtype)[:, None]
        out = (out * torch.sigmoid(lse - logit)[..., None]).to(out.dtype)
        # A sigmoid, because the difference of two infinities would be NaN.
        sink_share = torch.sigmoid(logit - lse)
        lse = torch.logaddexp(lse, logit)
        ctx.save_for_backward(q, k, v, out, lse, sink_share, bias)
        ctx.is_causal, ctx.scale, ctx.sink_dtype = is_causal, scale, sink.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # once_differentiable raises nothing if grad_out itself does not require a gradient.
            raise RuntimeError("sink_attention with form='rescale' has no second derivatives")
        q, k, v, out, lse, sink_share, bias = ctx.saved_tensors
        grads = _backward(
            grad_out, q, k, v, out, lse, 0.0, ctx.is_causal, attn_mask=bias, scale=ctx.scale
        )
        grad_sink = None
        if ctx.needs_input_grad[3]:
            along = (grad_out * out).sum(-1, dtype=lse.dtype)
            grad_sink = -(sink_share * along).sum((0, 2)).to(ctx.sink_dtype)
        return *grads, grad_sink, None, None, None
