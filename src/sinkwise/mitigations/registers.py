"""`Registers`: learned tokens in front of the sequence of a model that is already there."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from sinkwise.errors import InputError
from sinkwise.mitigations.base import Mitigation, Part
from sinkwise.mitigations.prepended_tokens import lengthen, width
from sinkwise.nn.registers import RegisterTokens


@dataclass(frozen=True)
class Registers(Mitigation):
    """[r_1 ... r_count, x_1 ... x_n]: learned tokens that every block sees and no read-out does.

    They join at the first block, after the positions were added, so position embeddings stay as
    they are; each block hands its tokens on without them. Pooling, patch features,
    `forward_features`, intermediate features and hidden states keep their shapes, and class tokens
    stay first. Token layouts call them `register`; in maps and scans they are tokens 0 onwards.
    The blocks do not look at their place, so before or after the class token is the same; rotary
    positions (timm's EVA and DINOv3, transformers' DINOv3) turn the patches as before, and no
    register.

    They start as distinct draws from N(0, std²): equal ones would stay equal. There is no start
    that leaves a pretrained model as it is: a token takes attention from the others as soon as it
    is seen, and one that is masked away gets no gradient. Train the model with them.

    Raises InputError for fewer than one, and on application where a model is causal, has relative
    positions inside its attention, or several towers.

    Reference: Darcet et al., 2024, arXiv 2309.16588.
    """

    count: int = 4
    """Number of registers."""
    std: float = 0.02
    """Standard deviation of their values at the start."""

    name: ClassVar[str] = "registers"

    def __post_init__(self) -> None:
        if self.count < 1:
            raise InputError(f"count={self.count} must be at least 1")
        if not self.std > 0:
            raise InputError(f"std={self.std} must be above 0: equal registers would stay equal")

    def apply(self, model: nn.Module, generator: torch.Generator, parts: list[Part]) -> None:
        tokens = RegisterTokens(self.count, width(model), std=self.std, generator=generator)
        lengthen(model, tokens, parts)
