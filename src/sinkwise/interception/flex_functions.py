"""The mask and score functions of a FlexAttention call, evaluated to find out what they do."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sinkwise.errors import CaptureError

_PROBES = (0.0, 1.0, -3.75, 31.0)
"""Scores at which a score function is evaluated to find out what it does."""


class Modified(NamedTuple):
    """What a score function does, as far as a record can express it."""

    softcap: float | None = None
    additive: Tensor | None = None
    known: bool = True
    """False where it is not a soft cap followed by an addition."""


def _is_default(function: Callable) -> bool:
    """True for the functions that flex_attention uses where none is given."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__name__", "")
    return module.startswith("torch.nn.attention.flex_") and name in ("_identity", "noop_mask")


def with_buffers(function: Callable, buffers: tuple) -> Callable:
    return (lambda *given: function(*given, *buffers)) if buffers else function


def allowed_keys(block_mask: tuple, mask_mod: Callable, q: Tensor, k: Tensor) -> Tensor | None:
    """True where a key is visible: one map for all samples and heads that share it."""
    if _is_default(mask_mod) and _is_whole(block_mask):
        return None
    allowed = _everywhere(mask_mod, q, k)
    if (allowed & ~_blocks(block_mask, q.shape[2], k.shape[2])).any():
        raise CaptureError(
            "a FlexAttention block mask excludes keys that its mask_mod allows, so that compiled "
            "and eager attention differ; make it with create_block_mask"
        )
    return None if bool(allowed.all()) else _shared(allowed)


def _is_whole(block_mask: tuple) -> bool:
    """True for the mask that flex_attention makes where none is given: one block over all keys."""
    return block_mask[3].numel() == 1 and int(block_mask[2].sum()) == 1


def _blocks(block_mask: tuple, queries: int, keys: int) -> Tensor:
    """True in the blocks that a compiled kernel would visit."""
    height, width = block_mask[-3], block_mask[-2]
    visited = None
    for count, index in (block_mask[2:4], block_mask[4:6]):
        if count is None:
            continue
        blocks = index.shape[-1]
        used = torch.arange(blocks, device=index.device) < count[..., None]
        dense = index.new_zeros(*index.shape[:-1], blocks + 1, dtype=torch.bool)
        dense = dense.scatter(-1, torch.where(used, index, blocks).long(), True)[..., :-1]
        visited = dense if visited is None else visited | dense
    assert visited is not None
    rows = torch.arange(queries, device=visited.device) // height
    cols = torch.arange(keys, device=visited.device) // width
    return visited[..., rows, :][..., cols]


def _shared(full: Tensor) -> Tensor:
    """A [batch head query key] map with one entry for samples, or heads, that are all equal."""
    for axis in (1, 0):
        first = full.narrow(axis, 0, 1)
        if bool((full == first).all()):
            full = first
    return full.contiguous()


def _everywhere(function: Callable, q: Tensor, k: Tensor, *scores: Tensor) -> Tensor:
    """A mask function, or a score function of given scores, at every [batch head query key]."""
    # As the operator itself does: it allows indexing with the batched tensors that vmap passes.
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    sizes = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    positions = [torch.arange(size, device=q.device) for size in sizes]
    given = (0,) * len(scores)
    for axis in reversed(range(4)):
        mapped = tuple(0 if other == axis else None for other in range(4))
        function = torch.vmap(function, in_dims=(*given, *mapped))
    with TransformGetItemToIndex():
        return function(*scores, *positions)


def modified_scores(score_mod: Callable, q: Tensor, k: Tensor) -> Modified:
    """Identity, an addition, or a soft cap and an addition, recognised by evaluating it."""
    if _is_default(score_mod):
        return Modified()
    zero = torch.zeros((), dtype=torch.float64, device=q.device)
    zero = zero.expand(*q.shape[:3], k.shape[2])
    values = [_shared(_everywhere(score_mod, q, k, zero + probe)) for probe in _PROBES]
    lowest = torch.finfo(torch.float32).min / 2
    bias = values[0]
    masked = bias <= lowest
    if bias.isnan().any() or any(_differ(value <= lowest, masked) for value in values):
        return Modified(known=False)
    visible = [torch.where(masked, 0.0, value - bias) for value in values]
    additive = torch.where(masked, -torch.inf, bias).to(torch.float32)
    plain = additive if bool((additive != 0).any()) else None
    if _follows(visible, masked, lambda score: score):
        return Modified(additive=plain)
    cap = _cap(visible[1], visible[3])
    if cap is not None and _follows(visible, masked, lambda score: cap * math.tanh(score / cap)):
        return Modified(softcap=cap, additive=plain)
    return Modified(known=False)


def _differ(one: Tensor, other: Tensor) -> bool:
    return bool((one != other).any())


def _follows(visible: list[Tensor], masked: Tensor, rule: Callable[[float], float]) -> bool:
    """Whether f(x) - f(0) is rule(x) at every probe and position."""
    return all(
        float((value - rule(probe)).abs().masked_fill(masked, 0.0).max()) <= 1e-5 * (1 + abs(probe))
        for probe, value in zip(_PROBES, visible, strict=True)
    )


def _cap(at_one: Tensor, at_large: Tensor) -> float | None:
    """c with c tanh(31 / c) = f(31) - f(0), by bisection; None where there is none."""
    target = float(at_large.max())
    if not 0 < target < _PROBES[3] or float(at_one.max()) > 1:
        return None
    low, high = 0.0, 1e4
    for _ in range(200):
        middle = (low + high) / 2
        below = middle * math.tanh(_PROBES[3] / middle) < target
        low, high = (middle, high) if below else (low, middle)
    return float(f"{high:.9g}")


def attention_map(
    score_mod: Callable, q: Tensor, k: Tensor, scale: float, allowed: Tensor | None
) -> Tensor:
    """The attention map, computed with the score function itself."""
    keys = k.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = _everywhere(score_mod, q, k, q.float() @ keys.mT * scale)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    return scores.softmax(dim=-1).nan_to_num(0.0)
