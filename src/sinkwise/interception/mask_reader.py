"""Masks as models pass them, recognised: causal order, windows and positions among the keys."""

from dataclasses import replace

import torch
from torch import Tensor

from sinkwise.attention.mask import causal_tile, visible_tile
from sinkwise.core.records import AttentionMask
from sinkwise.interception.tensor_map import TensorMap


@torch.no_grad()
def recognised(mask: AttentionMask, queries: int, keys: int) -> AttentionMask:
    """The same mask, with what its tensor says about positions in `causal`, `offset` and `window`.

    A tensor that masks, for every query, the keys after its own position makes a causal mask, with
    the `offset` of those positions. Where the tensor says nothing else (no padding, no bias) it is
    dropped, and a sliding window becomes `window`. The single query of a step with a cache is at
    the position of the last key that it sees; its mask stays open. A mask that lets queries see
    later keys stays as it is.
    """
    if mask.causal:
        return mask
    if mask.allowed is None and mask.additive is None:
        return replace(mask, offset=keys - 1) if queries == 1 else mask
    tensor = mask.allowed if mask.allowed is not None else mask.additive
    assert tensor is not None
    visible = visible_tile(mask, range(queries), range(keys), tensor.device)
    anyone = visible.flatten(0, 1).any(dim=0).expand(queries, keys)
    positions = torch.arange(keys, device=tensor.device)
    last = torch.where(anyone, positions, -1).amax(dim=1)
    ahead = torch.where(last >= 0, last - positions.new_tensor(range(queries)), -1)
    offset = int(ahead.max())
    if offset < 0:
        return mask  # no query sees any key
    bias = mask.additive
    biased = bias is not None and not bool(((bias == 0) | ~visible).all())
    if queries == 1:
        bare = not biased and bool(visible.all())
        return AttentionMask(offset=offset) if bare else replace(mask, offset=offset)
    # All queries have a position among the keys, and more than one sees its own last (no padding).
    if offset + queries > keys or int((ahead == offset).sum()) < 2:
        return mask
    if biased:
        return replace(mask, causal=True, offset=offset)
    width = int(anyone.sum(dim=1).max())
    for window in (None, width):
        order = AttentionMask(causal=True, offset=offset, window=window)
        tile = causal_tile(order, range(queries), range(keys), tensor.device)
        if bool((visible == tile).all()):
            return order
    return replace(mask, causal=True, offset=offset)


class MaskReader:
    """`recognised`, evaluated once per mask tensor: layers share theirs."""

    def __init__(self) -> None:
        self._known: TensorMap[tuple[tuple, AttentionMask]] = TensorMap()

    def read(
        self, mask: AttentionMask, tensor: Tensor | None, q: Tensor, k: Tensor
    ) -> AttentionMask:
        """The mask of a call; `tensor` is what the model passed, if it passed one."""
        queries, keys = q.shape[2], k.shape[2]
        if tensor is None or tensor.is_inference():  # which has no version to notice a change by
            return recognised(mask, queries, keys)
        state = (tensor._version, queries, keys)
        known = self._known.get(tensor)
        if known is not None and known[0] == state:
            return known[1]
        result = recognised(mask, queries, keys)
        self._known[tensor] = (state, result)
        return result

    def clear(self) -> None:
        """Forget every tensor."""
        self._known.clear()
