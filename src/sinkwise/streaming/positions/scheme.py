"""How a decoder encodes positions: rotary keys, a bias on the scores, or learned vectors."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from sinkwise.attention.rotary import Rotary
from sinkwise.errors import InputError
from sinkwise.hosts.inputs import position_limit
from sinkwise.streaming.positions.alibi import Bias, bias_of
from sinkwise.streaming.positions.decoder import Decoder
from sinkwise.streaming.positions.probe import attends_ahead
from sinkwise.streaming.positions.rotary import measured_rotary, rotary_modules


@dataclass(frozen=True, eq=False)
class Positions:
    """How a model encodes positions."""

    rotary: tuple[Rotary | None, ...]
    """Per layer; None where keys are not rotated."""
    bias: Bias | None = None
    """ALiBi, if the model has it."""
    learned: int | None = None
    """Number of learned positions, if the model has them."""
    limit: int | None = None
    """Position at which the model would change its frequencies (LongRoPE)."""

    def check(self, capacity: int, highest: int, name: str) -> None:
        """Raise InputError if a cache of that capacity, whose positions reach `highest`, does not
        fit the model called `name`.
        """
        if self.learned is not None and capacity > self.learned:
            raise InputError(
                f"num_sink_tokens + window_length = {capacity} is more than the {self.learned} "
                f"positions that {name} has learned; lower window_length"
            )
        if self.limit is not None and highest > self.limit:
            raise InputError(
                f"num_sink_tokens + window_length = {capacity} reaches position {highest}, and "
                f"{name} changes its frequencies at {self.limit} (LongRoPE): keys from before and "
                "after do not fit together; lower window_length"
            )


def positions_of(decoder: Decoder) -> Positions:
    """Find out how a decoder encodes positions.

    Raises InputError for dynamic-NTK scaling, and if the keys match no known encoding.
    """
    if attends_ahead(decoder):
        raise InputError(
            f"{type(decoder.base).__name__} is an encoder, whose tokens attend to later ones; a "
            "sink cache needs a decoder"
        )
    nothing = (None,) * len(decoder.attention)
    bias = bias_of(decoder.base)
    if bias is not None:
        return Positions(nothing, bias=bias)
    learned = position_limit(decoder.base)
    if learned is not None and "position_ids" in decoder.parameters:
        return Positions(nothing, learned=learned)
    modules = list(rotary_modules(decoder.base))
    if not modules or "position_ids" not in decoder.parameters:
        raise InputError(
            f"{type(decoder.base).__name__} has neither rotary, ALiBi nor learned positions, and a "
            "sink cache supports no others"
        )
    limit = None
    for module in modules:
        for kind in _rope_types(module):
            if "dynamic" in kind:
                raise InputError(
                    f"{type(decoder.base).__name__} has {kind!r} rotary scaling, whose frequencies "
                    "depend on how long the text is: keys of different ages do not fit together "
                    "in one cache; load it with another rope_type (llama3, yarn, linear)"
                )
            if kind == "longrope":
                limit = _original_length(decoder.config)
    return Positions(tuple(measured_rotary(decoder, modules)), limit=limit)


def _rope_types(module: nn.Module) -> set[str]:
    kinds = getattr(module, "rope_type", "default")
    return set(kinds.values()) if isinstance(kinds, dict) else {kinds}


def _original_length(config: Any) -> int:
    for where in ("rope_parameters", "rope_scaling"):
        given = getattr(config, where, None) or {}
        if "original_max_position_embeddings" in given:
            return given["original_max_position_embeddings"]
    original = getattr(config, "original_max_position_embeddings", None)
    return original if original is not None else config.max_position_embeddings
