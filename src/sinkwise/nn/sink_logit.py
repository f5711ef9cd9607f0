"""The sink logit: one logit per head in the softmax's denominator, without a value."""

from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from sinkwise.attention.mask import is_hidden
from sinkwise.errors import InputError
from sinkwise.nn.linear import DeviceLike
from sinkwise.nn.sink_column import column
from sinkwise.nn.sink_kernel import RescaledAttention, refusal

SinkForm = Literal["auto", "column", "rescale"]

Mask = Bool[Tensor, "#batch #head #query #key"] | Float[Tensor, "#batch #head #query #key"]
"""True where a query may attend to a key, or a value that is added to its score."""


def rescale(
    out: Float[Tensor, "batch head query value_dim"],
    lse: Float[Tensor, "batch head query"],
    sink: Float[Tensor, " head"],
) -> tuple[Float[Tensor, "batch head query value_dim"], Float[Tensor, "batch head query"]]:
    r"""A sink logit applied after any attention kernel: the new output and log-sum-exp.

    $$
    \mathrm{out} \cdot \sigma(\mathrm{lse} - \mathrm{sink}),\qquad
    \log(e^{\mathrm{lse}} + e^{\mathrm{sink}})
    $$

    `out` and `lse` (the log-sum-exp of each query's scores) are those of attention without a sink,
    as flash kernels and FlexAttention return them. A query without keys has lse = -inf, and gets
    output 0 and lse = sink. All three arguments get exact gradients.

    Reference: OpenAI, 2025, gpt-oss, arXiv 2508.10925.
    """
    logit = sink.to(lse.dtype)[:, None]
    # -inf - (-inf) is NaN, and so is the output of some kernels for a query without keys.
    empty = lse == -torch.inf
    lse = lse.masked_fill(empty, 0.0)
    scaled = out.masked_fill(empty[..., None], 0.0) * torch.sigmoid(lse - logit)[..., None]
    joint = torch.logaddexp(lse, logit)
    return scaled.to(out.dtype), torch.where(empty, logit, joint)


def sink_attention(
    q: Float[Tensor, "batch head query head_dim"],
    k: Float[Tensor, "batch kv_head key head_dim"],
    v: Float[Tensor, "batch kv_head key value_dim"],
    sink: Float[Tensor, " head"],
    *,
    attn_mask: Mask | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    form: SinkForm = "auto",
) -> Float[Tensor, "batch head query value_dim"]:
    r"""Attention with a sink logit in the softmax's denominator.

    $$
    \mathrm{out}_i = \frac{\sum_j e^{s_{ij}} v_j}{e^{\mathrm{sink}} + \sum_j e^{s_{ij}}},\qquad
    s = q k^\top \cdot \mathrm{scale} + \mathrm{mask}
    $$

    A head's weights sum to less than 1 and the sink takes the rest, so a head with nothing to add
    can write nothing. The output is finite for any logit from -inf (plain attention) upward; a
    query without keys gets output 0. `attn_mask` is True where a query may attend to a key, or is
    added to the scores and masks a key with -inf or the lowest value of its dtype. Heads may be
    grouped. `scale` is head_dim ** -0.5 unless given. q, k, v and sink get exact gradients.

    Two forms agree, and neither keeps a map:

    - `rescale`: out * sigmoid(lse - sink) with torch's CPU kernel, in float64, float32, float16
      and bfloat16, without dropout.
    - `column`: one more key whose score is the sink and whose value is zero, through
      F.scaled_dot_product_attention on any device. The logit is rounded to the dtype of q.

    `auto` chooses `rescale` if the call supports it. Neither form has second derivatives on a CPU.

    Raises InputError if the shapes do not fit, for `is_causal` with a mask or with unequal numbers
    of keys and queries, and for a form that does not support an option.

    Reference: OpenAI, 2025, gpt-oss, arXiv 2508.10925.
    """
    if has_torch_function((q, k, v, sink)):  # sinkwise.capture sees one call, not its inside
        return handle_torch_function(
            sink_attention,
            (q, k, v, sink),
            q,
            k,
            v,
            sink,
            attn_mask=attn_mask,
            is_causal=is_causal,
            scale=scale,
            dropout_p=dropout_p,
            form=form,
        )
    q, k, v = _cast(q), _cast(k), _cast(v)
    _check(q, k, v, sink, attn_mask, is_causal, dropout_p)
    if form not in get_args(SinkForm):
        raise InputError(f"form={form!r} must be one of {', '.join(get_args(SinkForm))}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    reason = refusal(q, k, v, attn_mask, dropout_p)
    if form == "rescale" and reason is not None:
        raise InputError(f"form='rescale' {reason}; use form='column'")
    bias = None if attn_mask is None else _bias(attn_mask, q.dtype, k.shape[2])
    if form == "column" or reason is not None:
        return column(q, k, v, sink, bias, is_causal, scale, dropout_p)
    # The kernel needs contiguous channels.
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    return RescaledAttention.apply(q, k, v, sink, bias, is_causal, scale)


def _cast(tensor: Tensor) -> Tensor:
    """What autocast does to an argument of F.scaled_dot_product_attention.

    Without it, rotated queries would be float32 and values in half precision.
    """
    device = tensor.device.type
    known = torch.amp.is_autocast_available(device)
    if tensor.dtype == torch.float64 or not (known and torch.is_autocast_enabled(device)):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    dropout_p: float,
) -> None:
    fit = q.dim() == k.dim() == v.dim() == 4 and k.shape[:3] == v.shape[:3]
    if not fit or q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
        raise InputError(f"q, k, v {shapes} must be [batch head token head_dim] and fit each other")
    heads, kv_heads = q.shape[1], k.shape[1]
    if kv_heads == 0 or heads % kv_heads:
        raise InputError(
            f"{heads} heads of q must be a multiple of the {kv_heads} heads of k and v"
        )
    if sink.shape != (heads,):
        raise InputError(f"sink {tuple(sink.shape)} must be ({heads},), one logit per head")
    if not 0.0 <= dropout_p < 1.0:
        raise InputError(f"dropout_p={dropout_p} must be at least 0 and below 1")
    if attn_mask is not None:
        whole = (*q.shape[:3], k.shape[2])
        sizes = zip(attn_mask.shape, whole, strict=False)
        if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
            raise InputError(f"attn_mask must be bool or floating, not {attn_mask.dtype}")
        if attn_mask.dim() != 4 or any(size not in (1, full) for size, full in sizes):
            raise InputError(f"attn_mask {tuple(attn_mask.shape)} must broadcast to {whole}")
    if is_causal and attn_mask is not None:
        raise InputError("is_causal=True with an attn_mask; put the causal order into the mask")
    if is_causal and q.shape[2] != k.shape[2]:
        raise InputError(
            f"is_causal=True needs as many keys as queries, not {k.shape[2]} and {q.shape[2]}; "
            "give an attn_mask instead"
        )


def _bias(attn_mask: Tensor, dtype: torch.dtype, keys: int) -> Tensor:
    """The mask as values to add to the scores, -inf where a key is masked."""
    if attn_mask.dtype == torch.bool:
        bias = torch.zeros_like(attn_mask, dtype=dtype).masked_fill(~attn_mask, -torch.inf)
    else:
        bias = attn_mask.to(dtype).masked_fill(is_hidden(attn_mask), -torch.inf)
    return bias.expand(*bias.shape[:-1], keys)


class SinkLogitAttention(nn.Module):
    """`sink_attention` with one learned logit per head: the parameter `logit` [head].

    All logits start at `init`. At 0, attention starts as softmax-one. A start far below every
    query's log-sum-exp (-20 at random weights, -40 in trained models) hardly changes a model, but
    the gradient of the logit is then as small as the share that the sink takes.

    Raises InputError for fewer than one head, and for an `init` that is not finite: a logit of -inf
    would never get a gradient.

    Reference: OpenAI, 2025, gpt-oss, arXiv 2508.10925.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        init: float = 0.0,
        device: DeviceLike = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`device` and `dtype` as in torch's modules."""
        super().__init__()
        if num_heads < 1:
            raise InputError(f"num_heads={num_heads} must be at least 1")
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if not abs(init) <= torch.finfo(dtype).max:
            raise InputError(
                f"init={init} must be finite in {dtype}: a logit of -inf never gets a gradient"
            )
        self.logit = nn.Parameter(torch.full((num_heads,), float(init), device=device, dtype=dtype))

    def forward(
        self,
        q: Float[Tensor, "batch head query head_dim"],
        k: Float[Tensor, "batch kv_head key head_dim"],
        v: Float[Tensor, "batch kv_head key value_dim"],
        *,
        attn_mask: Mask | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        dropout_p: float = 0.0,
        form: SinkForm = "auto",
    ) -> Float[Tensor, "batch head query value_dim"]:
        return sink_attention(
            q,
            k,
            v,
            self.logit,
            attn_mask=attn_mask,
            is_causal=is_causal,
            scale=scale,
            dropout_p=dropout_p,
            form=form,
        )
