"""out * sigmoid(lse - sink) inside the attention kernel's own passes: forward and backward."""

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
    """Why torch's CPU kernel cannot take this call; None where it can."""
    if q.device.type != "cpu":
        return f"runs on a CPU alone, q is on {q.device}"
    if dropout_p:
        return f"has no dropout, dropout_p={dropout_p} was given"
    if q.shape[-1] != v.shape[-1]:
        return f"needs values as wide as keys, v has {v.shape[-1]} channels and k {k.shape[-1]}"
    if attn_mask is not None and attn_mask.requires_grad:
        return "gives no gradient to attn_mask, which asks for one"
    if q.numel() == 0 or k.numel() == 0:
        return "needs at least one query and one key"
    if q.dtype not in _DTYPES:
        return f"does not compute in {q.dtype}"
    return None


class RescaledAttention(torch.autograd.Function):
    """softmax attention with exp(sink) in the denominator, without its map.

    The kernel gives out and lse. With out' = out * sigmoid(lse - sink) and
    lse' = log(exp(lse) + exp(sink)), its own backward pass is already the right one: it rebuilds
    P' = exp(s - lse') and dS = P' * (dO v^T - dO . out'), and the sink, whose value is zero, gets
    -exp(sink - lse') * dO . out'. So the sink costs two passes over the output and no product.

    A query without keys: the kernel's output is 0 and its lse 0, which leaves every gradient 0.
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
        # As a sigmoid, where the difference of two infinities would not be a number.
        sink_share = torch.sigmoid(logit - lse)
        lse = torch.logaddexp(lse, logit)
        ctx.save_for_backward(q, k, v, out, lse, sink_share, bias)
        ctx.is_causal, ctx.scale, ctx.sink_dtype = is_causal, scale, sink.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # once_differentiable would stay silent where grad_out itself asks for no gradient.
            raise RuntimeError("form='rescale' of sink_attention has no second derivatives")
        q, k, v, out, lse, sink_share, bias = ctx.saved_tensors
        grads = _backward(
            grad_out, q, k, v, out, lse, 0.0, ctx.is_causal, attn_mask=bias, scale=ctx.scale
        )
        grad_sink = None
        if ctx.needs_input_grad[3]:
            along = (grad_out * out).sum(-1, dtype=lse.dtype)
            grad_sink = -(sink_share * along).sum((0, 2)).to(ctx.sink_dtype)
        return *grads, grad_sink, None, None, None
