"""Adapter for `F.scaled_dot_product_attention`: its arguments and log-sum-exp as record fields."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from sinkwise.core.records import AttentionMask
from sinkwise.interception.intercepted import Description, Intercepted
from sinkwise.interception.shapes import four_dimensional


class SdpaCall(NamedTuple):
    """The arguments of one `F.scaled_dot_product_attention`, defaults filled in."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float
    enable_gqa: bool
    args: tuple
    kwargs: dict[str, Any]


def intercept(func: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor, Description]:
    """Run the kernel and describe the call."""
    call = bind(*args, **kwargs)
    out, lse = run(func, call)
    return out, functools.partial(describe, call, out, lse)


def bind(*args: Any, **kwargs: Any) -> SdpaCall:
    """Name the arguments of an SDPA call."""
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    scale = given["scale"]
    if scale is None:
        scale = given["query"].shape[-1] ** -0.5
    return SdpaCall(**{**given, "scale": float(scale)}, args=args, kwargs=kwargs)


def _sdpa(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):  # fmt: skip
    raise NotImplementedError("only its signature is used")


_SIGNATURE = inspect.signature(_sdpa)


def run(func: Callable, call: SdpaCall) -> tuple[Tensor, Tensor | None]:
    """Run the kernel as the model would, with its log-sum-exp where the kernel returns it.

    On a CPU the fused kernel is called by its own name, which returns both; the output is the same
    bit for bit. Where another kernel would run, or gradients are needed, the log-sum-exp is None.
    """
    q, k, v = call.query, call.key, call.value
    plain = q.dim() == 4 and q.device.type == "cpu" and call.dropout_p == 0
    plain &= type(q) is Tensor and not q.is_nested and q.shape[-1] == v.shape[-1]
    inputs = [t for t in (q, k, v, call.attn_mask) if t is not None]
    wants_grad = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    if not plain or wants_grad or torch.is_autocast_enabled("cpu"):
        return func(*call.args, **call.kwargs), None
    choice = torch._fused_sdp_choice(
        q, k, v, call.attn_mask, 0.0, call.is_causal, scale=call.scale, enable_gqa=call.enable_gqa
    )
    if choice != SDPBackend.FLASH_ATTENTION.value:
        return func(*call.args, **call.kwargs), None
    mask = call.attn_mask
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, call.is_causal, attn_mask=mask, scale=call.scale
    )
    return out, lse


def describe(
    call: SdpaCall, out: Tensor, lse: Tensor | None, owner: nn.Module | None
) -> Intercepted:
    """The fields of one call."""
    q = four_dimensional(call.query)
    fields: dict[str, Any] = {
        "q": q,
        "k": four_dimensional(call.key),
        "v": four_dimensional(call.value),
        "out": four_dimensional(out),
        "scale": call.scale,
        "mask": _mask(call),
        "lse": None if lse is None else lse.reshape(q.shape[:3]),
    }
    return Intercepted(_unpacked(fields, owner), call.attn_mask, has_dropout=call.dropout_p > 0)


def _mask(call: SdpaCall) -> AttentionMask:
    if call.attn_mask is None:
        return AttentionMask(causal=call.is_causal)
    given = four_dimensional(call.attn_mask)
    if given.dtype == torch.bool:
        return AttentionMask(allowed=given)
    return AttentionMask(additive=given)


def _unpacked(fields: dict[str, Any], owner: nn.Module | None) -> dict[str, Any]:
    """Heads as heads again, where transformers passes the query heads of a group as queries of one
    head (a single token of grouped-query attention with a cache).
    """
    q = fields["q"]
    group = getattr(owner, "num_key_value_groups", None)
    heads = getattr(getattr(owner, "config", None), "num_attention_heads", None)
    if group == 1 or q.shape[2] != group or q.shape[1] != fields["k"].shape[1]:
        return fields
    if q.shape[1] * q.shape[2] != heads:
        return fields

    def apart(tensor: Tensor) -> Tensor:
        return tensor.flatten(1, 2).unsqueeze(2)

    mask: AttentionMask = fields["mask"]
    if mask.allowed is not None and mask.allowed.shape[1] > 1:
        mask = AttentionMask(allowed=apart(mask.allowed))
    elif mask.additive is not None and mask.additive.shape[1] > 1:
        mask = AttentionMask(additive=apart(mask.additive))
    lse = fields["lse"]
    separate = {"q": apart(q), "out": apart(fields["out"]), "mask": mask}
    return {**fields, **separate, "lse": None if lse is None else apart(lse)}
