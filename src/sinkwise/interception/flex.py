"""Adapter for FlexAttention: its mask and score functions as the fields of a record."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops.flex_attention import flex_attention as OPERATOR

from sinkwise.core.records import AttentionMask
from sinkwise.interception import flex_functions as functions
from sinkwise.interception.intercepted import Deferral, Description, Intercepted, Rescaled

LSE_UNIT = 1 / math.log(2.0)
"""The operator's log-sum-exp is this times the natural one: its base is 2."""


def is_flex(func: object) -> bool:
    """Whether this is the operator that `flex_attention` calls, compiled or not."""
    return func is OPERATOR


def intercept(func: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, Description]:
    """Run the operator and describe the call, whose log-sum-exp may rescale the output later."""
    out, lse, *more = func(*args, **kwargs)
    return (out, lse, *more), functools.partial(_describe, args, out, lse)


def _describe(args: tuple, out: Tensor, lse: Tensor, owner: nn.Module | None) -> Intercepted:
    fields = _fields(args, out, lse)
    deferral = Deferral(
        object(), out, functools.partial(_rescaled, fields), lse=lse, lse_factor=LSE_UNIT
    )
    return Intercepted(fields, deferral=deferral)


@torch.no_grad()
def _fields(args: tuple, out: Tensor, lse: Tensor) -> dict[str, Any]:
    """A record's fields from the operator's arguments and results.

    The mask is `mask_mod` itself, evaluated; a score function that adds (ALiBi, biases) goes into
    the mask, one that caps by tanh into `softcap`. For any other one the map is computed here, and
    the record is marked unfaithful.
    """
    q, k, v, score_mod, block_mask, scale = args[:6]
    if k.shape[0] != q.shape[0]:
        k, v = (t.expand(q.shape[0], *t.shape[1:]) for t in (k, v))
    score_buffers, mask_buffers = args[7:9]
    score_mod = functions.with_buffers(score_mod, score_buffers)
    mask_mod = functions.with_buffers(block_mask[-1], mask_buffers)
    allowed = functions.allowed_keys(block_mask, mask_mod, q, k)
    modified = functions.modified_scores(score_mod, q, k)
    fields = {"q": q, "k": k, "v": v, "out": out, "scale": float(scale)}
    fields["lse"] = lse / LSE_UNIT if lse.shape == q.shape[:3] else None
    fields["mask"] = AttentionMask(allowed=allowed, additive=modified.additive)
    fields["softcap"] = modified.softcap
    if not modified.known:
        fields["weights"] = functions.attention_map(score_mod, q, k, float(scale), allowed)
        fields["faithful"] = False
    return fields


def _rescaled(fields: dict[str, Any], to: Rescaled) -> dict[str, Any]:
    """The fields that change if the output is rescaled by the share that a sink logit leaves."""
    rows = fields["out"].shape[:3]
    sink = to.sink.reshape(rows).to(torch.float32)
    changed: dict[str, Any] = {"out": to.out, "sink_logit": sink}
    if fields["lse"] is not None:
        changed["lse"] = torch.logaddexp(fields["lse"], sink)
    if "weights" in fields:
        changed["weights"] = fields["weights"] * to.share.reshape(*rows, 1)
    return changed
