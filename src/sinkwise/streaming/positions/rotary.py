"""How a decoder tells positions: by turning its keys, by a bias, or by learned vectors.

Which coordinates turn how fast is not taken from a table of families: one token is fed at two
positions, and the frequencies of the model's own rotary module that explain the difference of its
keys, in one of the two known pairings, are the layer's. A key that none explains is refused.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sinkwise.attention.rotary import Rotary
from sinkwise.errors import InputError
from sinkwise.hosts.inputs import position_limit
from sinkwise.streaming.positions.alibi import Bias, bias_of
from sinkwise.streaming.positions.decoder import Decoder
from sinkwise.streaming.positions.probe import distance, keys_and_values, looks_ahead

_PROBES = (1, 61)
"""Positions to which the probing token moves: one for the fast pairs, one for the slow."""


@dataclass(frozen=True, eq=False)
class Positions:
    """What a model's positions are made of."""

    rotary: tuple[Rotary | None, ...]
    """Of each layer; None where keys do not turn."""
    bias: Bias | None = None
    """ALiBi, where the model has it."""
    learned: int | None = None
    """Number of learned positions, where it has them."""
    limit: int | None = None
    """Positions from which on the model would change its frequencies (LongRoPE)."""


def positions_of(decoder: Decoder) -> Positions:
    """Find out how the decoder tells positions.

    Raises InputError for dynamic-NTK scaling and where the keys tell nothing that is known.
    """
    if looks_ahead(decoder):
        raise InputError(
            f"{type(decoder.base).__name__} is an encoder, whose tokens look ahead: a cache serves "
            "decoders"
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
            f"{type(decoder.base).__name__} has neither rotary, ALiBi nor learned positions: a "
            "sink cache cannot know where its keys stand"
        )
    limit = None
    for module in modules:
        for kind in _rope_types(module):
            if "dynamic" in kind:
                raise InputError(
                    f"{type(decoder.base).__name__} has {kind!r} rotary scaling, whose frequencies "
                    "depend on how long the text has become: keys of different ages do not fit "
                    "together in one cache. Load it with another rope_type (llama3, yarn, linear)"
                )
            if kind == "longrope":
                limit = _original_length(decoder.config)
    return Positions(tuple(_probe(decoder, modules)), limit=limit)


def rotary_modules(base: nn.Module) -> Iterator[nn.Module]:
    """Modules that turn positions into cosines and sines."""
    for module in base.modules():
        if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
            yield module


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


def _probe(decoder: Decoder, modules: list[nn.Module]) -> Iterator[Rotary | None]:
    """The rotary positions of each layer, as measured."""
    frequencies = _frequencies(modules)
    at = [keys_and_values(decoder, position) for position in (0, *_PROBES)]
    if len(at[0]) != len(decoder.attention):
        raise InputError(
            f"{type(decoder.base).__name__} keeps keys in {len(at[0])} of "
            f"{len(decoder.attention)} layers: layers that share keys are not served"
        )
    known: dict[int, list[Rotary]] = {}
    for layer, (keys, values) in enumerate(at[0]):
        loose = 1e-3 if keys.dtype in (torch.float32, torch.float64) else 5e-2
        moved = [states[layer][0] for states in at[1:]]
        head_dim = keys.shape[-1]
        best: Rotary | None = None
        error = max(distance(keys, other) for other in moved)
        # Layers share what they can, so that a step's cosines are made once.
        for rotary in known.setdefault(head_dim, list(_candidates(frequencies, head_dim))):
            turned = [rotary.turn(keys, torch.tensor(position)) for position in _PROBES]
            pairs = zip(turned, moved, strict=True)
            off = max(distance(one, other) for one, other in pairs)
            if off < error:
                best, error = rotary, off
        turning = max(distance(values, states[layer][1]) for states in at[1:])
        if max(error, turning) > loose:
            raise InputError(
                f"layer {layer} of {type(decoder.base).__name__} turns its keys by position in a "
                "way that its rotary module does not explain: a sink cache cannot move its sinks"
            )
        yield best


def _frequencies(modules: list[nn.Module]) -> list[Tensor]:
    """The different frequencies that the model has."""
    found: list[Tensor] = []
    for module in modules:
        for name, buffer in module.named_buffers(recurse=False):
            if not name.endswith("inv_freq"):
                continue
            value = buffer.detach().to("cpu", torch.float64)
            if not any(torch.equal(value, other) for other in found):
                found.append(value)
    return found


def _candidates(frequencies: list[Tensor], head_dim: int) -> Iterator[Rotary]:
    for value in frequencies:
        for start in sorted({0, head_dim - 2 * len(value)}):
            if 0 <= start <= head_dim - 2 * len(value):
                yield Rotary(value, start)
                yield Rotary(value, start, interleaved=True)
