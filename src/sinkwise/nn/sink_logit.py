"""The sink logit: a learned logit a head in the softmax's denominator, without a value."""

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


def rescale(
    out: Float[Tensor, "batch head query value_dim"],
    lse: Float[Tensor, "batch head query"],
    sink: Float[Tensor, " head"],
) -> tuple[Float[Tensor, "batch head query value_dim"], Float[Tensor, "batch head query"]]:
    """(out * sigmoid(lse - sink), log(exp(lse) + exp(sink))): a sink put after any kernel.

    `out` and `lse` (log-sum-exp of each query's scores) are those of attention without a sink, as
    flash kernels and FlexAttention return them; a query without keys has lse = -inf, and gets
    output 0 and lse = sink. All three arguments get exact gradients.

    Reference: OpenAI, 2025, gpt-oss, arXiv 2508.10925.
    """
    logit = sink.to(lse.dtype)[:, None]
    # -inf - (-inf) is no number, and some kernels' output for a query without keys is none either.
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
    attn_mask: Bool[Tensor, "#batch #head #query #key"]
    | Float[Tensor, "#batch #head #query #key"]
    | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    form: SinkForm = "auto",
) -> Float[Tensor, "batch head query value_dim"]:
    """out_i = sum_j exp(s_ij) v_j / (exp(sink) + sum_j exp(s_ij)), s = q k^T * scale + mask.

    The head's weights sum to less than 1 and the sink takes the rest, so a head with nothing to
    add can write nothing. Any logit from -inf (plain attention) up is finite; a query without keys
    gets output 0. `attn_mask` is True where a key may be seen, or is added to the scores and hides
    where it is -inf or its dtype's lowest value; heads may be grouped; `scale` is
    head_dim ** -0.5 unless given. q, k, v and sink get exact gradients.

    The forms agree, and neither keeps a map:
    - `rescale`: out * sigmoid(lse - sink) with torch's CPU kernel (float64, 32, 16; no dropout);
    - `column`: one more key whose score is the sink and whose value is zero, through
      F.scaled_dot_product_attention on any device. The logit is rounded to q's dtype.
    `auto` takes `rescale` where it can. Neither has second derivatives on a CPU.

    Raises InputError where the shapes do not fit, for `is_causal` beside a mask or with another
    number of keys than queries, and for a form that cannot honour an option.

    Reference: OpenAI, 2025, gpt-oss, arXiv 2508.10925.
    """
    if has_torch_function((q, k, v, sink)):  # sinkwise.capture sees one call, not what is inside
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
        raise InputError(f"form='rescale' {reason}: use form='column'")
    bias = None if attn_mask is None else _bias(attn_mask, q.dtype, k.shape[2])
    if form == "column" or reason is not None:
        return column(q, k, v, sink, bias, is_causal, scale, dropout_p)
    # The kernel reads rows of channels as they lie.
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    return RescaledAttention.apply(q, k, v, sink, bias, is_causal, scale)


def _cast(tensor: Tensor) -> Tensor:
    """What autocast does to the arguments of F.scaled_dot_product_attention: rotated queries are
    float32 beside values in half precision.
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
        raise InputError(f"sink {tuple(sink.shape)} must be one logit for each of {heads} heads")
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
        raise InputError("is_causal=True beside an attn_mask: put the causal order into the mask")
    if is_causal and q.shape[2] != k.shape[2]:
        raise InputError(
            f"is_causal=True needs as many keys as queries, not {k.shape[2]} and {q.shape[2]}: "
            "give an attn_mask"
        )


def _bias(attn_mask: Tensor, dtype: torch.dtype, keys: int) -> Tensor:
    """The mask as numbers to add, -inf where hidden."""
    if attn_mask.dtype == torch.bool:
        bias = torch.zeros_like(attn_mask, dtype=dtype).masked_fill(~attn_mask, -torch.inf)
    else:
        bias = attn_mask.to(dtype).masked_fill(is_hidden(attn_mask), -torch.inf)
    return bias.expand(*bias.shape[:-1], keys)


class SinkLogitAttention(nn.Module):
    """`sink_attention` with one learned logit a head: `logit` [head], all `init` at the start.

    At 0 it starts as softmax-one. A start far below every query's log-sum-exp (-20 at random
    weights, -40 in trained models) leaves a model nearly as it is; the logit's gradient is then as
    small as the share that the sink takes.

    Raises InputError where there is no head, or where `init` is not finite: a sink at -inf would
    never get a gradient.

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
        super().__init__()
        if num_heads < 1:
            raise InputError(f"num_heads={num_heads} must be at least 1")
        if not -float("inf") < init < float("inf"):
            raise InputError(f"init={init} must be finite: a logit at -inf never gets a gradient")
        self.logit = nn.Parameter(torch.full((num_heads,), float(init), device=device, dtype=dtype))

    def forward(
        self,
        q: Float[Tensor, "batch head query head_dim"],
        k: Float[Tensor, "batch kv_head key head_dim"],
        v: Float[Tensor, "batch kv_head key value_dim"],
        *,
        attn_mask: Bool[Tensor, "#batch #head #query #key"]
        | Float[Tensor, "#batch #head #query #key"]
        | None = None,
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
