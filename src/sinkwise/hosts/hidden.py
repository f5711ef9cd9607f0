"""Tokens that only a model's blocks see: whole sequences are remembered beside their visible part.

Blocks with prepended tokens compute on the whole sequence and pass on a view of it without those
tokens. A weak map leads from that view to the whole sequence, so that the next block and a capture
find it.
"""

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# By the identity of the tensor, which the loop over the blocks passes on unchanged.
_WHOLE = WeakTensorKeyDictionary()


def without_prefix(sequence: Tensor, count: int) -> Tensor:
    """The view of `sequence` [batch token dim] without its first `count` tokens."""
    visible = sequence[:, count:]
    _WHOLE[visible] = sequence
    return visible


def remember(visible: Tensor, sequence: Tensor) -> None:
    """Record that `sequence` was made from `visible` by prepending tokens.

    A leaf that requires a gradient is not recorded: the graph of `sequence` would keep the leaf,
    and therefore the entry, alive.
    """
    if not (visible.is_leaf and visible.requires_grad):
        _WHOLE[visible] = sequence


def remembered(visible: Tensor) -> Tensor | None:
    """The sequence of which this very tensor is the visible part, or None."""
    return _WHOLE.get(visible)


def whole(visible: Tensor) -> Tensor:
    """The sequence that the blocks see: `visible` itself if no tokens were prepended to it."""
    sequence = remembered(visible)
    return visible if sequence is None else whole(sequence)
