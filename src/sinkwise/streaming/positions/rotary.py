"""The rotary positions of each layer, measured.

There is no table of model families: one token is run at two positions, and the frequencies of the
model's own rotary modules that explain the change of its keys, in one of the two known pairings,
are the layer's. Keys that no frequencies explain are refused.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from sinkwise.attention.rotary import Rotary
from sinkwise.errors import InputError
from sinkwise.streaming.positions.decoder import Decoder
from sinkwise.streaming.positions.probe import distance, keys_and_values

_PROBES = (1, 61)
"""Positions at which the probe token is run: one for the fast pairs, one for the slow ones."""


def rotary_modules(base: nn.Module) -> Iterator[nn.Module]:
    """The modules that compute cosines and sines from positions."""
    for module in base.modules():
        if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
            yield module


def measured_rotary(decoder: Decoder, modules: list[nn.Module]) -> Iterator[Rotary | None]:
    """The rotary positions of each layer; None where keys are not rotated.

    Raises InputError for layers that share keys, and for keys that `modules` do not explain.
    """
    frequencies = _frequencies(modules)
    at = [keys_and_values(decoder, position) for position in (0, *_PROBES)]
    if len(at[0]) != len(decoder.attention):
        raise InputError(
            f"{type(decoder.base).__name__} caches keys in {len(at[0])} of "
            f"{len(decoder.attention)} layers; a sink cache does not support layers that share keys"
        )
    known: dict[int, list[Rotary]] = {}
    for layer, (keys, values) in enumerate(at[0]):
        loose = 1e-3 if keys.dtype in (torch.float32, torch.float64) else 5e-2
        moved = [states[layer][0] for states in at[1:]]
        head_dim = keys.shape[-1]
        best: Rotary | None = None
        error = max(distance(keys, other) for other in moved)
        # Layers share their Rotary, so that cosines are computed once per step.
        for rotary in known.setdefault(head_dim, list(_candidates(frequencies, head_dim))):
            rotated = [rotary.rotate(keys, torch.tensor(position)) for position in _PROBES]
            pairs = zip(rotated, moved, strict=True)
            off = max(distance(one, other) for one, other in pairs)
            if off < error:
                best, error = rotary, off
        value_change = max(distance(values, states[layer][1]) for states in at[1:])
        if max(error, value_change) > loose:
            raise InputError(
                f"layer {layer} of {type(decoder.base).__name__} changes its keys or values with "
                "the position in a way that its rotary module does not explain: a sink cache "
                "cannot move its sinks"
            )
        yield best


def _frequencies(modules: list[nn.Module]) -> list[Tensor]:
    """The distinct frequencies of the model."""
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
