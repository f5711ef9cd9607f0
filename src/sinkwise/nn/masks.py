"""What a token sees with sinks + window, as a mask: for training, and for prefill in one pass.

The mask says which keys are visible. Positions stay those of the text; a sink cache has the sinks
at their place in the cache instead, so the two give the same result for models without positions,
and the same visibility for all.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from sinkwise.core.retention import Retention

MaskFunction = Callable[[Any, Any, Tensor, Tensor], Tensor]
"""(batch, head, query, key) → whether the query sees the key."""


def sink_mask_function(window_length: int, num_sink_tokens: int) -> MaskFunction:
    """The rule as FlexAttention and transformers take it: key ≤ query, and the key is among the
    first `num_sink_tokens` or the `window_length` up to the query.

    For FlexAttention: `create_block_mask(sink_mask_function(1020, 4), None, None, T, T)`. For
    transformers: `create_causal_mask(..., and_mask_function=sink_mask_function(1020, 4))`.

    Raises InputError for a window below 1 or a negative number of sinks.

    Reference: Xiao et al., 2023, arXiv 2309.17453.
    """
    kept = Retention(num_sink_tokens, window_length)
    # A lambda: FlexAttention counts its arguments, which a type-checked function hides.
    return lambda batch, head, query, key: (
        ((key > query - kept.window_length) | (key < kept.num_sink_tokens)) & (key <= query)
    )


def sink_mask(length: int, window_length: int, num_sink_tokens: int) -> Bool[Tensor, "query key"]:
    """The rule as a tensor, True where the query sees the key: SDPA's `attn_mask`.

    >>> sink_mask(5, 2, 1).int().tolist()
    [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 1, 1, 0], [1, 0, 0, 1, 1]]
    """
    place = torch.arange(length)
    visible = sink_mask_function(window_length, num_sink_tokens)
    return visible(None, None, place[:, None], place[None, :])
