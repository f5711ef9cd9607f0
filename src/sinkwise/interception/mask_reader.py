"""Masks as models pass them, read: causal order, windows and positions among the keys."""

import weakref
from dataclasses import replace

import torch
from torch import Tensor

from sinkwise.attention.mask import causal_tile, visible_tile
from sinkwise.core.records import AttentionMask


@torch.no_grad()
def recognised(mask: AttentionMask, queries: int, keys: int) -> AttentionMask:
    """The same mask, with what its tensors say of positions in words.

    A tensor that hides from every query the keys after its own position makes a causal mask, with
    the `offset` of those positions; where the tensor says nothing else (no padding, no bias) it is
    dropped, and a sliding window becomes `window`. The one query of a cached step stands at the
    last key that it sees; its mask stays open. A mask that looks ahead stays as it is.
    """
    if mask.causal:
        return mask
    if mask.allowed is None and mask.additive is None:
        return replace(mask, offset=keys - 1) if queries == 1 else mask
    tensor = mask.allowed if mask.allowed is not None else mask.additive
    assert tensor is not None
    visible = visible_tile(mask, range(queries), range(keys), tensor.device)
    anyone = visible.flatten(0, 1).any(dim=0).expand(queries, keys)
    places = torch.arange(keys, device=tensor.device)
    last = torch.where(anyone, places, -1).amax(dim=1)
    ahead = torch.where(last >= 0, last - places.new_tensor(range(queries)), -1)
    offset = int(ahead.max())
    if offset < 0:
        return mask  # nobody sees anything
    bias = mask.additive
    biased = bias is not None and not bool(((bias == 0) | ~visible).all())
    if queries == 1:
        bare = not biased and bool(visible.all())
        return AttentionMask(offset=offset) if bare else replace(mask, offset=offset)
    # Queries stand among the keys, and more than one sees its own position last (not padding).
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


class Reader:
    """`recognised`, once for each tensor: layers share their mask."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref, tuple, AttentionMask]] = {}

    def read(
        self, mask: AttentionMask, given: Tensor | None, q: Tensor, k: Tensor
    ) -> AttentionMask:
        """The mask of a call, made of the tensor `given` by the model, if by one."""
        queries, keys = q.shape[2], k.shape[2]
        if given is None:
            return recognised(mask, queries, keys)
        state = (given._version, queries, keys) if not given.is_inference() else None
        entry = self._known.get(id(given))
        if state is not None and entry is not None and entry[0]() is given and entry[1] == state:
            return entry[2]
        result = recognised(mask, queries, keys)
        if state is not None:
            self._known[id(given)] = (weakref.ref(given), state, result)
        return result

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()
