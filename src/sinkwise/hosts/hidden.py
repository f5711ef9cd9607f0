"""Tokens that a model's blocks see and nothing outside of them does: a stream and its visible part.

Blocks with added tokens work on the whole stream and hand on a view of it without those tokens. The
whole is remembered here beside the view, weakly, so that the next block, and a capture, find it.
"""

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# By the identity of the tensor, which the loop over the blocks passes on as it is.
_WHOLE = WeakTensorKeyDictionary()


def visible(stream: Tensor, count: int) -> Tensor:
    """The view of `stream` [batch token dim] without its first `count` tokens."""
    part = stream[:, count:]
    _WHOLE[part] = stream
    return part


def stands_for(part: Tensor, stream: Tensor) -> None:
    """`stream` was made of `part` by adding tokens in front. A leaf that collects gradients is not
    remembered: its stream's graph would keep it, and so the entry, alive.
    """
    if not (part.is_leaf and part.requires_grad):
        _WHOLE[part] = stream


def behind(part: Tensor) -> Tensor | None:
    """The stream whose visible part this very tensor is, or None."""
    return _WHOLE.get(part)


def whole(part: Tensor) -> Tensor:
    """The stream that the blocks see of it: `part` itself where nothing is hidden."""
    stream = behind(part)
    return part if stream is None else whole(stream)
