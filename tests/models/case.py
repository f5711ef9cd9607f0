"""What the table of small models says about each, and the inputs they share."""

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
    """One model: how it is built and what capture must find in it."""

    name: str
    make: Callable[[], tuple[nn.Module, Any]]
    layers: tuple[int, ...]
    """The layer of each record of one forward pass, in order; its length is their number."""
    causal: tuple[bool, ...] | bool = False
    """Whether each record's map is zero above the diagonal."""
    linear: str = "qkvo"
    """Which projections are linear in the attention module's input, so that sites can be tested."""
    faithful: tuple[bool, ...] | bool = True
    """False where q, k, scale and mask cannot tell the whole score."""
    residual: tuple[bool, ...] | bool = True
    """Whether the block's input has each record's batch and queries, and so is its residual."""
    prefix: tuple[str, ...] | None = None
    """Kinds before the patches, for pictures in a sequence."""
    suffix: int = 0
    fast_path: bool = False
    """True where torch's fast path, avoided while capturing, rounds differently."""
    silent: int = 0
    """Blocks without softmax attention: linear attention, state-space layers, convolutions."""
    grouped: int = 1
    """Query heads per key/value head."""

    def each(self, fact: str) -> tuple[Any, ...]:
        """A fact of every record."""
        value = getattr(self, fact)
        return value if isinstance(value, tuple) else (value,) * len(self.layers)

    def build(self) -> tuple[nn.Module, Any]:
        """(model, inputs), the same at each call."""
        torch.manual_seed(11)
        model, inputs = self.make()
        with torch.no_grad():
            for parameter in model.parameters():  # zero-initialised parts would hide mistakes
                if parameter.dim() < 2 or float(parameter.abs().max()) < 1e-2:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        return model.eval(), inputs


CASES: list[Case] = []
"""Filled by the modules of this package."""

EXTRA: list[Case] = []
"""Models that conform, but whose sites no layout tells in full (weights or the norm before)."""


def add(name: str, make: Callable, layers: tuple[int, ...], **facts: Any) -> None:
    """A row of the table; `extra` for one whose sites are not told in full."""
    (EXTRA if facts.pop("extra", False) else CASES).append(Case(name, make, layers, **facts))


def run(model: nn.Module, inputs: Any) -> Any:
    """The model's answer to a tuple or a dict of inputs."""
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def tensors(out: Any) -> list[Tensor]:
    """All tensors of an answer, in order."""
    if isinstance(out, Tensor):
        return [out]
    if isinstance(out, dict):
        out = list(out.values())
    if isinstance(out, tuple | list):
        return [tensor for part in out for tensor in tensors(part)]
    return []


def pixels(size: tuple[int, int] = IMAGE) -> Tensor:
    """A batch of pictures."""
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
