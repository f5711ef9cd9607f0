"""FlexAttention: its mask and score functions as the fields of a record."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sinkwise.core.records import AttentionMask
from sinkwise.errors import CaptureError
from sinkwise.interception.lse_trace import Scaled

LSE_UNIT = 1 / math.log(2.0)
"""The operator's log-sum-exp is this times the natural one: it counts in powers of 2."""

_PROBES = (0.0, 1.0, -3.75, 31.0)
"""Scores at which a score function is evaluated to learn what it does."""


class Modified(NamedTuple):
    """What a score function does, as far as a record can say it."""

    softcap: float | None = None
    additive: Tensor | None = None
    known: bool = True
    """False where it is no soft cap followed by an addition."""


def is_flex(func: object) -> bool:
    """True for the operator that `flex_attention` calls, compiled away or not."""
    operator = isinstance(func, torch._ops.HigherOrderOperator)
    return operator and getattr(func, "__name__", "") == "flex_attention"


@torch.no_grad()
def fields(args: tuple, out: Tensor, lse: Tensor) -> dict[str, Any]:
    """A record's fields from the operator's arguments and results.

    The mask is `mask_mod` itself, evaluated; a score function that adds (ALiBi, biases) goes into
    the mask, one that caps by tanh into `softcap`. For any other one the map is computed here, and
    the record is marked unfaithful. The operator's log-sum-exp is to base 2.
    """
    q, k, v, score_mod, block_mask, scale = args[:6]
    if k.shape[0] != q.shape[0]:
        k, v = (t.expand(q.shape[0], *t.shape[1:]) for t in (k, v))
    score_buffers, mask_buffers = args[7:9]
    score_mod = _bound(score_mod, score_buffers)
    allowed = _mask(block_mask, _bound(block_mask[-1], mask_buffers), q, k)
    found = {"q": q, "k": k, "v": v, "out": out, "scale": float(scale)}
    found["lse"] = lse / LSE_UNIT if lse.shape == q.shape[:3] else None
    if _is_default(score_mod):
        modified = Modified()
    else:
        modified = _modified(score_mod, q, k)
    found["mask"] = AttentionMask(allowed=allowed, additive=modified.additive)
    found["softcap"] = modified.softcap
    if not modified.known:
        found["weights"] = _weights(score_mod, q, k, float(scale), allowed)
        found["faithful"] = False
    return found


def sunk(found: dict[str, Any], scaled: Scaled) -> dict[str, Any]:
    """The fields of a call whose output was scaled by the share that a sink logit leaves."""
    rows = found["out"].shape[:3]
    sink = scaled.sink.reshape(rows).to(torch.float32)
    more: dict[str, Any] = {"out": scaled.out, "sink_logit": sink}
    if found["lse"] is not None:
        more["lse"] = torch.logaddexp(found["lse"], sink)
    if "weights" in found:
        more["weights"] = found["weights"] * scaled.share.reshape(*rows, 1)
    return {**found, **more}


def _is_default(function: Callable) -> bool:
    """True for the functions that flex_attention takes where none is given."""
    place = getattr(function, "__module__", ""), getattr(function, "__name__", "")
    return place[0].startswith("torch.nn.attention.flex_") and place[1] in (
        "_identity",
        "noop_mask",
    )


def _bound(function: Callable, buffers: tuple) -> Callable:
    return (lambda *given: function(*given, *buffers)) if buffers else function


def _mask(block_mask: tuple, mask_mod: Callable, q: Tensor, k: Tensor) -> Tensor | None:
    """True where a key may be seen: one map for all samples and heads that share it."""
    if _is_default(mask_mod) and _is_whole(block_mask):
        return None
    allowed = _everywhere(mask_mod, q, k)
    if (allowed & ~_blocks(block_mask, q.shape[2], k.shape[2])).any():
        raise CaptureError(
            "a FlexAttention block mask hides keys that its mask_mod shows, so that compiled and "
            "eager attention differ; make it with create_block_mask"
        )
    return None if bool(allowed.all()) else _shared(allowed)


def _is_whole(block_mask: tuple) -> bool:
    """True for the mask that flex_attention makes when none is given: one block of everything."""
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
    """A [batch head query key] map with one entry where samples, or heads, do not differ."""
    for axis in (1, 0):
        first = full.narrow(axis, 0, 1)
        if bool((full == first).all()):
            full = first
    return full.contiguous()


def _everywhere(function: Callable, q: Tensor, k: Tensor, *scores: Tensor) -> Tensor:
    """A mask function, or a score function of given scores, at every [batch head query key]."""
    # As the operator itself does: it lets tensors be indexed by what vmap hands the function.
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    sizes = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    places = [torch.arange(size, device=q.device) for size in sizes]
    given = (0,) * len(scores)
    for axis in reversed(range(4)):
        place = tuple(0 if other == axis else None for other in range(4))
        function = torch.vmap(function, in_dims=(*given, *place))
    with TransformGetItemToIndex():
        return function(*scores, *places)


def _modified(score_mod: Callable, q: Tensor, k: Tensor) -> Modified:
    """Identity, an addition, or a soft cap and an addition: found by evaluation."""
    zero = torch.zeros((), dtype=torch.float64, device=q.device)
    zero = zero.expand(*q.shape[:3], k.shape[2])
    values = [_shared(_everywhere(score_mod, q, k, zero + probe)) for probe in _PROBES]
    lowest = torch.finfo(torch.float32).min / 2
    bias = values[0]
    hidden = bias <= lowest
    if bias.isnan().any() or any(_differ(value <= lowest, hidden) for value in values):
        return Modified(known=False)
    shown = [torch.where(hidden, 0.0, value - bias) for value in values]
    additive = torch.where(hidden, -torch.inf, bias).to(torch.float32)
    plain = additive if bool((additive != 0).any()) else None
    if _is_map(shown, hidden, lambda score: score):
        return Modified(additive=plain)
    cap = _cap(shown[1], shown[3])
    if cap is not None and _is_map(shown, hidden, lambda score: cap * math.tanh(score / cap)):
        return Modified(softcap=cap, additive=plain)
    return Modified(known=False)


def _differ(one: Tensor, other: Tensor) -> bool:
    return bool((one != other).any())


def _is_map(shown: list[Tensor], hidden: Tensor, rule: Callable[[float], float]) -> bool:
    """Whether f(x) - f(0) is rule(x) at every probe and place."""
    return all(
        float((value - rule(probe)).abs().masked_fill(hidden, 0.0).max()) <= 1e-5 * (1 + abs(probe))
        for probe, value in zip(_PROBES, shown, strict=True)
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


def _weights(
    score_mod: Callable, q: Tensor, k: Tensor, scale: float, allowed: Tensor | None
) -> Tensor:
    """The map, computed with the score function itself."""
    keys = k.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = _everywhere(score_mod, q, k, q.float() @ keys.mT * scale)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    return scores.softmax(dim=-1).nan_to_num(0.0)
