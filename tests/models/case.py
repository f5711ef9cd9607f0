"""One row of the table of small models, and the inputs that rows share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

BATCH, TOKENS, VOCABULARY = 2, 13, 97
IMAGE, PATCH = (24, 40), 8
GRID = (IMAGE[0] // PATCH, IMAGE[1] // PATCH)


@dataclass(frozen=True, eq=False)
class Case:
    """One model: how to build it, and what a capture must find in it."""

    name: str
    make: Callable[[], tuple[nn.Module, Any]]
    layers: tuple[int, ...]
    """The layer of each record of one forward pass, in order."""
    causal: tuple[bool, ...] | bool = False
    """Whether each record's map is 0 above the diagonal."""
    linear: str = "qkvo"
    """Projections that are linear in the module's input, so that their sites can be tested."""
    faithful: tuple[bool, ...] | bool = True
    """False if q, k, scale and mask do not determine the scores."""
    residual: tuple[bool, ...] | bool = True
    """Whether the block's input has the record's batch and queries, and so is its residual."""
    prefix: tuple[str, ...] | None = None
    """Kinds of the tokens before the patches, for images in a sequence."""
    suffix: int = 0
    fast_path: bool = False
    """True if torch's fast path, which capture avoids, rounds differently."""
    silent: int = 0
    """Blocks without softmax attention: linear attention, state-space layers, convolutions."""
    grouped: int = 1
    """Query heads per key/value head."""

    def each(self, fact: str) -> tuple[Any, ...]:
        """A field, for every record."""
        value = getattr(self, fact)
        return value if isinstance(value, tuple) else (value,) * len(self.layers)

    def build(self) -> tuple[nn.Module, Any]:
        """The same (model, inputs) at each call."""
        torch.manual_seed(11)
        model, inputs = self.make()
        with torch.no_grad():
            for parameter in model.parameters():  # zero-initialized parts would mask errors
                if parameter.dim() < 2 or float(parameter.abs().max()) < 1e-2:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        return model.eval(), inputs


CASES: list[Case] = []
"""Filled by the modules of this package."""

EXTRA: list[Case] = []
"""Models that pass the checks, but whose sites are only partly known (weights or norm)."""


def add(name: str, make: Callable, layers: tuple[int, ...], **facts: Any) -> None:
    """Add a row to the table; `extra` for one whose sites are only partly known."""
    (EXTRA if facts.pop("extra", False) else CASES).append(Case(name, make, layers, **facts))


def run(model: nn.Module, inputs: Any) -> Any:
    """The model's output for a tuple or a dict of inputs."""
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def tensors(out: Any) -> list[Tensor]:
    """All tensors of an output, in order."""
    if isinstance(out, Tensor):
        return [out]
    if isinstance(out, dict):
        out = list(out.values())
    if isinstance(out, tuple | list):
        return [tensor for part in out for tensor in tensors(part)]
    return []


def pixels(size: tuple[int, int] = IMAGE) -> Tensor:
    """A batch of images."""
    return torch.randn(BATCH, 3, *size)


def ids(length: int = TOKENS, vocabulary: int = VOCABULARY) -> Tensor:
    """A batch of token ids, none of them special."""
    return torch.randint(5, vocabulary, (BATCH, length))


def padded(side: str = "right", length: int = TOKENS) -> dict[str, Tensor]:
    """Token ids whose second sample has three tokens of padding."""
    tokens, mask = ids(length), torch.ones(BATCH, length, dtype=torch.int64)
    pad = slice(length - 3, length) if side == "right" else slice(0, 3)
    tokens[1, pad], mask[1, pad] = 0, 0
    return {"input_ids": tokens, "attention_mask": mask}
