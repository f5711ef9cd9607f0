"""Calls of torch's attention kernel: their arguments, their log-sum-exp, their shapes."""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from sinkwise.core.records import AttentionMask


class Call(NamedTuple):
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


def bind(*args: Any, **kwargs: Any) -> Call:
    """Name the arguments of an SDPA call."""
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    scale = given["scale"]
    if scale is None:
        scale = given["query"].shape[-1] ** -0.5
    return Call(**{**given, "scale": float(scale)}, args=args, kwargs=kwargs)


def _sdpa(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):  # fmt: skip
    raise NotImplementedError("only its signature is used")


_SIGNATURE = inspect.signature(_sdpa)


def run(func: Callable, call: Call) -> tuple[Tensor, Tensor | None]:
    """Run the kernel as the model would, and its log-sum-exp where the kernel gives it.

    On a CPU the fused kernel is called by its own name, which returns both; the output is the same
    to the bit. Where another kernel would run, or gradients are wanted, the log-sum-exp is None.
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


def ungrouped(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values once for each key/value head, where a model repeated them for its groups.

    Found by their bits: repeated heads are equal, and equal heads may be shared without loss.
    """
    heads = k.shape[1]
    if heads == 1 or heads != v.shape[1] or k.shape[2] == 0:
        return k, v
    some = k.detach()[0, :, [0, k.shape[2] // 2, -1]].flatten(1)  # a cache's end may be empty
    new = (some[1:] != some[:-1]).any(dim=-1).tolist()  # where a head differs from the one before
    group = new.index(True) + 1 if True in new else heads
    if group == 1 or heads % group:
        return k, v
    for tensor in (k, v):
        split = tensor.unflatten(1, (-1, group))
        if not bool((split == split[:, :, :1]).all()):
            return k, v
    return k[:, ::group], v[:, ::group]


def unpacked(fields: dict[str, Any], owner: nn.Module | None) -> dict[str, Any]:
    """Heads as heads again, where transformers passes the heads of a group as the queries of one
    (a single token of grouped-query attention with a cache).
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


def four_dimensional(tensor: Tensor) -> Tensor:
    """[.. head query width] with one batch axis: missing axes added, leading ones joined."""
    while tensor.dim() < 4:
        tensor = tensor.unsqueeze(0)
    return tensor.flatten(0, -4)


def batch_and_heads(
    weights: Tensor, lead: tuple[int, ...], owner: nn.Module | None
) -> tuple[int, int]:
    """(batch, heads) of an attention map, from the shape its softmax saw or the module's heads."""
    if len(lead) >= 2:
        return int(torch.Size(lead[:-1]).numel()), lead[-1]
    joint = int(torch.Size(lead).numel())
    for attribute in ("num_heads", "num_attention_heads", "n_heads", "heads"):
        heads = getattr(owner, attribute, None)
        if isinstance(heads, int) and heads > 0 and joint % heads == 0:
            return joint // heads, heads
    return joint, 1


def with_lead(tensor: Tensor, lead: tuple[int, int]) -> Tensor:
    """Reshape [.. row col] to [batch head row col]; a single shared head stays single."""
    rows, cols = tensor.shape[-2:]
    joint = int(tensor.shape[:-2].numel())
    batch, heads = lead
    if tensor.shape[:-2] == lead:
        return tensor  # itself, so that gradients can be asked for
    if joint == batch * heads:
        return tensor.reshape(batch, heads, rows, cols)
    if joint % batch == 0:
        return tensor.reshape(batch, joint // batch, rows, cols)
    return (
        tensor.expand(batch, *tensor.shape[-3:])
        if tensor.dim() == 4
        else tensor.expand(batch, heads, rows, cols)
    )


def bias_with_lead(bias: Tensor, lead: tuple[int, int]) -> Tensor:
    """A broadcastable bias as [#batch #head query key]."""
    if bias.dim() == 3 and bias.shape[0] == lead[0] * lead[1]:
        return bias.reshape(*lead, *bias.shape[-2:])
    return four_dimensional(bias)


@functools.cache
def unwrapped_mha() -> Callable:
    """`F.multi_head_attention_forward` whose body runs inside a torch function mode.

    The original hands itself to the mode and so hides the attention within. This is the same code
    object with its own globals, in which no argument asks for that.
    """
    original = F.multi_head_attention_forward
    scope = {**original.__globals__, "has_torch_function": lambda _: False}
    copy = types.FunctionType(
        original.__code__, scope, original.__name__, original.__defaults__, original.__closure__
    )
    copy.__kwdefaults__ = original.__kwdefaults__
    return copy
