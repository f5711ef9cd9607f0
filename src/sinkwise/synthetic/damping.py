"""Conditional damping: a task whose head must often do nothing, so that it learns a NOP sink."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from sinkwise.errors import InputError
from sinkwise.synthetic.model import AttentionOnly
from sinkwise.synthetic.task import Task, TaskBatch, orthogonal_to


@dataclass(frozen=True, kw_only=True)
class Damping(Task):
    r"""The fast form: aligned tokens stay as they are, all others receive the mean of all tokens.

    $$y_i = x_i + [i \text{ not aligned}] \cdot \tfrac{1}{n} \sum_j M x_j$$

    over the $n$ content tokens. A fixed direction in each input, its flag, says whether the token
    is aligned. Softmax weights always sum to 1, so the head cannot simply write nothing: the
    aligned queries learn to attend to a token whose value becomes zero, an adaptive NOP. That token
    is the null token at position 0, a constant that the loss ignores, or a register.

    Reference: "A Unifying View of Attention Sinks: Two Algorithms, Two Solutions", 2026,
    arXiv 2606.08105; this is a smaller and faster form of its task.
    """

    summary: ClassVar[str] = (
        "Aligned tokens must keep their state; every other token must receive the mean of all "
        "tokens: yᵢ = xᵢ + [i not aligned] · meanⱼ(M xⱼ). Attention weights always sum to 1, so "
        "the head cannot simply write nothing. It learns to send the aligned queries to a token "
        "whose value is zero: an adaptive NOP."
    )

    aligned_share: float = 0.5
    """Probability that a content token is aligned, so that its update must be zero."""
    null_norm: float | None = 0.25
    """Norm of the null token over sqrt(dim), the typical norm of a content token; None for no null
    token. A null token of norm 1 is so easy to attend to that a gate does not replace it."""
    common_norm: float = 0.0
    """Norm, over sqrt(dim), of a component that all content tokens share. Without it no query can
    avoid all of them at once, so all scores cannot fall below a sink logit together."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.aligned_share <= 1:
            raise InputError(f"aligned_share={self.aligned_share} must lie in [0, 1]")
        if self.null_norm is not None and self.null_norm <= 0:
            raise InputError(f"null_norm={self.null_norm} must be positive or None")
        if self.common_norm < 0:
            raise InputError(f"common_norm={self.common_norm} must be at least 0")

    @property
    def num_unscored(self) -> int:
        return 0 if self.null_norm is None else 1

    def fixed(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """The orthogonal unit vectors `flag`, `null` and, with a `common_norm`, `common`; and the
        orthogonal matrix `mix`, M in the formula.
        """
        generator = generator or torch.Generator().manual_seed(self.seed)
        names = ("flag", "null", "common") if self.common_norm else ("flag", "null")
        basis = torch.linalg.qr(torch.randn(self.dim, len(names), generator=generator)).Q
        mix = torch.linalg.qr(torch.randn(self.dim, self.dim, generator=generator)).Q
        return {**dict(zip(names, basis.T.clone(), strict=True)), "mix": mix}

    def sample(
        self, generator: torch.Generator, count: int, fixed: Mapping[str, Tensor] | None = None
    ) -> TaskBatch:
        """Inputs, targets, and which tokens are aligned (never the null token, at position 0).

        Content is orthogonal to the flag, the null token and the common direction, so that the head
        can read each of them separately.
        """
        fixed = self.fixed() if fixed is None else fixed
        flag, null = fixed["flag"], fixed["null"]
        content = torch.randn(count, self.length, self.dim, generator=generator)
        common = [fixed["common"]] if self.common_norm else []
        content = orthogonal_to(content, flag, null, *common)
        aligned = torch.rand(count, self.length, generator=generator) < self.aligned_share
        sign = torch.where(aligned, 1.0, -1.0)[..., None]
        content = content + sign * 0.5 * math.sqrt(self.dim) * flag
        for direction in common:
            content = content + self.common_norm * math.sqrt(self.dim) * direction
        update = (content @ fixed["mix"].T).mean(1, keepdim=True) * ~aligned[..., None]
        if self.null_norm is None:
            return TaskBatch(content, content + update, aligned)
        first = self.null_norm * math.sqrt(self.dim) * null.expand(count, 1, -1)
        inputs = torch.cat([first, content], 1)
        targets = torch.cat([first, content + update], 1)
        return TaskBatch(inputs, targets, F.pad(aligned, (1, 0)))

    def model(self, generator: torch.Generator) -> AttentionOnly:
        """The untrained model: one layer of one head."""
        return AttentionOnly(
            self.dim,
            gate=self.gate,
            softmax=self.softmax,
            num_registers=self.num_registers,
            pathway=self.pathway,
            generator=generator,
        )

    def loss(self, model: Any, batch: TaskBatch) -> Float[Tensor, ""]:
        """Mean squared error, and the pathway's penalty if there is a pathway."""
        if not self.pathway:
            return super().loss(model, batch)
        states = model.states(batch.inputs)
        error = model.content(states[-1]) - batch.targets
        error = error[:, self.num_unscored :].square().mean()
        return error + model.pathway_penalty(model.start(batch.inputs), states)
