"""Which keys a mask removes and what it adds to the scores, whole or per tile."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinkwise.core.records import AttentionMask


def is_hidden(additive: Float[Tensor, "..."]) -> Bool[Tensor, "..."]:
    """True where an additive bias masks a key: -inf, or at most half the dtype's lowest value."""
    return additive <= torch.finfo(additive.dtype).min / 2


def causal_tile(mask: AttentionMask, rows: range, keys: range, device: torch.device) -> Tensor:
    """Bool [query key]: what causality and the window leave visible in one tile."""
    query = mask.positions_of(rows, device)[:, None]
    key = torch.arange(keys.start, keys.stop, device=device)[None, :]
    visible = key <= query
    if mask.window is not None:
        visible &= key > query - mask.window
    return visible


def _part(tensor: Tensor, rows: range, keys: range) -> Tensor:
    """The tile of a broadcastable mask tensor."""
    if tensor.shape[-2] != 1:
        tensor = tensor[..., rows.start : rows.stop, :]
    if tensor.shape[-1] != 1:
        tensor = tensor[..., keys.start : keys.stop]
    return tensor


def key_range(mask: AttentionMask, rows: range, num_keys: int) -> range:
    """The keys that some of these queries can see by position; all others can be skipped."""
    if not mask.causal:
        return range(num_keys)
    first, last = mask.position_range(rows)
    stop = min(num_keys, max(0, last + 1))
    start = 0
    if mask.window is not None:
        start = min(stop, max(0, first - mask.window + 1))
    return range(start, stop)


def biased_keys(mask: AttentionMask, rows: range, keys: range) -> range:
    """The end of `keys` that needs a bias: before it no key is masked and nothing is added."""
    plain = mask.causal and mask.window is None and mask.allowed is None and mask.additive is None
    if not plain:
        return keys
    first, _ = mask.position_range(rows)
    return range(min(max(keys.start, first + 1), keys.stop), keys.stop)


def visible_tile(
    mask: AttentionMask, rows: range, keys: range, device: torch.device
) -> Bool[Tensor, "#batch #head #query #key"]:
    """True where a query of `rows` sees a key of `keys`."""
    visible = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    if mask.causal:
        visible = visible & causal_tile(mask, rows, keys, device)
    if mask.allowed is not None:
        visible = visible & _part(mask.allowed, rows, keys).to(device)
    if mask.additive is not None:
        visible = visible & ~is_hidden(_part(mask.additive, rows, keys).to(device))
    return visible


def bias_tile(
    mask: AttentionMask, rows: range, keys: range, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "#batch #head #query #key"] | None:
    """The bias of one tile of scores: the additive mask, and -inf for masked keys; None if zero.

    Most tiles need none: those that lie entirely below a causal diagonal.
    """
    first, last = mask.position_range(rows)
    below = mask.causal and keys.stop - 1 <= first
    if below and mask.window is not None:
        below = keys.start > last - mask.window
    if (below or not mask.causal) and mask.allowed is None and mask.additive is None:
        return None
    bias = torch.zeros(1, 1, 1, 1, dtype=dtype, device=device)
    if mask.additive is not None:
        additive = _part(mask.additive, rows, keys).to(device)
        bias = additive.to(dtype).masked_fill(is_hidden(additive), -torch.inf)
    if mask.allowed is not None:
        bias = torch.where(_part(mask.allowed, rows, keys).to(device), bias, -torch.inf)
    if mask.causal and not below:
        bias = torch.where(causal_tile(mask, rows, keys, device), bias, -torch.inf)
    return bias


def visibility(
    mask: AttentionMask, batch: int, head: int, query: int, key: int, device: torch.device | str
) -> Bool[Tensor, "batch head query key"]:
    """Visibility of every key to every query, for references and tests."""
    tile = visible_tile(mask, range(query), range(key), torch.device(device))
    return tile.expand(batch, head, query, key)
