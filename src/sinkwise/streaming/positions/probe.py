"""Probes of a decoder with one or two random tokens: its keys by position, and its causality.

torch's global random state is not used, and the model is left as it was.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sinkwise.streaming.positions.decoder import Decoder


def keys_and_values(decoder: Decoder, position: int) -> list[tuple[Tensor, Tensor]]:
    """Each layer's key and value of a single token, which attends to itself only, at a position."""
    from transformers import DynamicCache

    cache: Any = DynamicCache()
    tokens = _tokens(decoder, 1)
    position_ids = torch.tensor([[position]], device=tokens.device)
    with _evaluating(decoder):
        decoder.base(
            inputs_embeds=tokens,
            position_ids=position_ids,
            use_cache=True,
            **{decoder.cache_argument: cache},
        )
    return [(layer.keys.to("cpu"), layer.values.to("cpu")) for layer in cache.layers]


def attends_ahead(decoder: Decoder) -> bool:
    """Whether the second of two tokens changes the first."""
    with _evaluating(decoder):
        one, two = (
            decoder.base(inputs_embeds=_tokens(decoder, 2)[:, :count], use_cache=False)
            for count in (1, 2)
        )
    return distance(one[0][:, :1], two[0][:, :1]) > 0.01


def distance(one: Tensor, other: Tensor) -> float:
    """‖one − other‖ / ‖other‖."""
    scale = other.norm().clamp(min=torch.finfo(other.dtype).tiny)
    return float((one - other).norm() / scale)


def _tokens(decoder: Decoder, count: int) -> Float[Tensor, "one token dim"]:
    weight: Any = decoder.base.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, count, weight.shape[1], generator=generator).to(weight)


@contextmanager
def _evaluating(decoder: Decoder) -> Iterator[None]:
    """The model in eval mode, without gradients."""
    modes = [(module, module.training) for module in decoder.base.modules()]
    decoder.base.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
