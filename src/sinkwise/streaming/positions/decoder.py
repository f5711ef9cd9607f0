"""The part of a model that a sink cache attaches to: decoder, attention modules, layer windows."""

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from sinkwise.core.retention import Retention
from sinkwise.errors import InputError

_KINDS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, eq=False)
class Decoder:
    """The module that loops over the layers, and the signature of its forward."""

    base: PreTrainedModel
    """The module whose forward gets the cache."""
    attention: tuple[nn.Module, ...]
    """The attention module of each layer."""
    windows: tuple[int | None, ...]
    """Each layer's own sliding window; None for full attention."""
    parameters: tuple[str, ...]
    """Names of the arguments of its forward, in order."""

    @property
    def cache_argument(self) -> str:
        """The name of the cache's argument, which transformers renames within 5.x."""
        return "cache" if "cache" in self.parameters else "past_key_values"

    @property
    def config(self) -> Any:
        """The decoder's own configuration."""
        return self.base.config

    def retentions(self, wanted: Retention) -> tuple[Retention, ...]:
        """What each layer keeps: `wanted`, or its own sliding window without sinks.

        A sliding layer keeps its own window if other layers of the model have full attention, or
        if its window is shorter than the cache. If all layers slide (Mistral), a window at least
        as long as the cache removes nothing, and the layers keep sinks + window.
        """
        hybrid = None in self.windows
        return tuple(
            wanted
            if window is None or (not hybrid and window >= wanted.capacity)
            else Retention(0, window)
            for window in self.windows
        )


def decoder_of(model: nn.Module) -> Decoder:
    """Find the decoder of a transformers model.

    Raises InputError for an encoder-decoder, for a model without attention layers that use a
    cache, and for layers that are neither full nor sliding-window attention.
    """
    attention = _attention(model)
    base: PreTrainedModel | None = None
    for module in model.modules():  # the last is the innermost
        if isinstance(module, PreTrainedModel):
            inside = set(module.modules())
            base = module if all(part in inside for part in attention) else base
    if base is None or not attention:
        raise InputError(
            f"{type(model).__name__} has no attention layers of transformers that use a cache; "
            "give a decoder such as LlamaForCausalLM"
        )
    config = base.config
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(
            f"{type(model).__name__} has an encoder, whose tokens attend to later ones; give a "
            "decoder alone"
        )
    kinds = getattr(config, "layer_types", None)
    unknown = sorted(set(kinds or ()) - _KINDS)
    if unknown or [part.layer_idx for part in attention] != list(range(len(attention))):
        raise InputError(
            f"{type(base).__name__} has layers of kind {', '.join(unknown) or 'without attention'};"
            " a sink cache needs full or sliding-window attention in every layer"
        )
    return Decoder(base, attention, _windows(config, attention), _parameters(base))


def _parameters(base: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(base.forward).parameters)


def _attention(model: nn.Module) -> tuple[nn.Module, ...]:
    """The innermost modules with a layer index and a mask argument, in layer order."""
    found = [
        module
        for module in model.modules()
        if isinstance(getattr(module, "layer_idx", None), int)
        and "attention_mask" in inspect.signature(module.forward).parameters
    ]
    inner = [
        module
        for module in found
        if not any(other in found for other in list(module.modules())[1:])
    ]
    inner.sort(key=lambda module: module.layer_idx)  # type: ignore[arg-type, return-value]
    return tuple(inner)


def _windows(config: Any, attention: tuple[nn.Module, ...]) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if window is None or not getattr(config, "use_sliding_window", True):
        return (None,) * len(attention)
    if kinds is None:
        return (window,) * len(attention)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
