"""Sinks + window as an attention mask: for training, and for prefill in one pass.

The mask decides which keys are visible. Positions are those of the text, whereas a sink cache uses
cache positions. The two therefore give the same result for models without positions, and the same
visibility for all models.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from sinkwise.core.retention import Retention

MaskFunction = Callable[[Any, Any, Tensor, Tensor], Tensor]
"""(batch, head, query, key) → whether the query may attend to the key."""


def sink_mask_function(window_length: int, num_sink_tokens: int) -> MaskFunction:
    """Sinks + window as a mask function, for FlexAttention and transformers.

    A query may attend to the first `num_sink_tokens` keys and to the `window_length` most recent
    ones, its own included, but to no later key.

    For FlexAttention: `create_block_mask(sink_mask_function(1020, 4), None, None, T, T)`. For
    transformers: `create_causal_mask(..., and_mask_function=sink_mask_function(1020, 4))`.

    Raises InputError for a window below 1 and for a negative number of sinks.

    Reference: Xiao et al., 2023, arXiv 2309.17453.
    """
    kept = Retention(num_sink_tokens, window_length)
    # A lambda: FlexAttention counts its arguments, which a type-checking wrapper would hide.
    return lambda batch, head, query, key: (
        ((key > query - kept.window_length) | (key < kept.num_sink_tokens)) & (key <= query)
    )


def sink_mask(length: int, window_length: int, num_sink_tokens: int) -> Bool[Tensor, "query key"]:
    """Sinks + window as a tensor, True where the query may attend to the key: SDPA's `attn_mask`.

    Raises InputError for a window below 1 and for a negative number of sinks.

    >>> sink_mask(5, 2, 1).int().tolist()
    [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 1, 1, 0], [1, 0, 0, 1, 1]]

    Reference: Xiao et al., 2023, arXiv 2309.17453.
    """
    position = torch.arange(length)
    visible = sink_mask_function(window_length, num_sink_tokens)
    return visible(None, None, position[:, None], position[None, :])
