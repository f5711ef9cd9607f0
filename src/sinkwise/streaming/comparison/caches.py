"""The cache that a method fills."""

from typing import Any

from torch import nn

from sinkwise.hosts.inputs import position_limit
from sinkwise.streaming.cache import SinkCache
from sinkwise.streaming.comparison.methods import Method
from sinkwise.streaming.positions.decoder import decoder_of


def empty_cache(model: Any, method: Method) -> Any:
    """A cache of the method's kind; a sink cache is attached to the model."""
    from transformers import DynamicCache

    if method.kind == "dense":
        return DynamicCache(config=model.config)
    window = method.cache_length - method.num_sink_tokens
    return SinkCache(model, window, method.num_sink_tokens)


def dense_length(model: nn.Module, length: int) -> int:
    """How many of `length` tokens dense attention can take."""
    learned = position_limit(decoder_of(model).base)
    return length if learned is None else min(length, learned)
