"""`Registers`: learned tokens before the sequence of an existing model."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from sinkwise.errors import InputError
from sinkwise.mitigations.base import Insertion, Mitigation
from sinkwise.mitigations.prepended_tokens import prepend, token_width
from sinkwise.nn.registers import RegisterTokens


@dataclass(frozen=True)
class Registers(Mitigation):
    r"""Learned tokens that every block sees and no output does: $[r_1 \ldots r_m, x_1 \ldots x_n]$.

    They join at the first block, after positions were added, so position embeddings do not change,
    and each block passes on the other tokens only. Pooling, patch features, `forward_features`,
    intermediate features and hidden states keep their shapes, and class tokens stay first. Token
    layouts call them `register`; in maps and scans they are the first tokens, from 0. Their
    position does not matter to the supported blocks, so being before or after the class token is
    the same: rotary positions (timm's EVA and DINOv3, transformers' DINOv3) rotate the patches as
    before, and not the registers.

    They start as distinct draws from $N(0, \mathrm{std}^2)$: equal registers would stay equal. No
    start leaves a pretrained model unchanged: a visible token takes attention from the others at
    once, and a masked one gets no gradient. Train the model with them.

    Raises InputError for a count below 1 or a standard deviation that is not positive. On
    application, raises InputError if the model is causal, has relative positions inside its
    attention, has several towers, or has blocks that are not known to support registers.

    Reference: Darcet et al., 2024, arXiv 2309.16588.
    """

    count: int = 4
    """Number of registers."""
    std: float = 0.02
    """Standard deviation of their initial values."""

    name: ClassVar[str] = "registers"

    def __post_init__(self) -> None:
        if self.count < 1:
            raise InputError(f"count={self.count} must be at least 1")
        if not self.std > 0:
            raise InputError(f"std={self.std} must be above 0: equal registers would stay equal")

    def apply(
        self, model: nn.Module, generator: torch.Generator, insertions: list[Insertion]
    ) -> None:
        tokens = RegisterTokens(
            self.count,
            token_width(model),
            std=self.std,
            generator=generator,
            device=generator.device,  # also if torch's default device is another
        )
        prepend(model, tokens, insertions)
