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
from sinkwise.synthetic.paper_models import PositionalAttention
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
            raise InputError(f"aligned_share must lie in [0, 1]; got {self.aligned_share}")
        if self.null_norm is not None and self.null_norm <= 0:
            raise InputError(f"null_norm must be positive or None; got {self.null_norm}")
        if self.common_norm < 0:
            raise InputError(f"common_norm must be at least 0; got {self.common_norm}")

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


@dataclass(frozen=True, kw_only=True)
class ActiveDamping(Task):
    r"""The base of the authors' two forms: active tokens are damped, all others stay as they are.

    $$y_i = \gamma x_i \text{ if } \langle x_i, v \rangle > \lambda, \text{ else } x_i$$

    with $x_i \sim N(0, I)$ and a fixed unit vector $v$; $\lambda$ is `threshold`, $\gamma$ is
    `gamma`. The head must cancel part of an active token's residual. Position 0 has no content and
    no loss.
    """

    summary: ClassVar[str] = (
        "A token is active if ⟨x, v⟩ exceeds a threshold, for a fixed unit vector v. An active "
        "token must become γx, so the head must cancel part of its residual; all other tokens must "
        "stay as they are, so for them the head must do nothing."
    )

    dim: int = 64
    length: int = 32
    batch: int = 1024
    steps: int = 2000
    decay: bool = False
    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 1e-4
    threshold: float = 0.0
    """Tokens with a larger ⟨x, v⟩ are active; at 4 or more almost none is."""
    gamma: float = 0.0
    """Factor on an active token; at 1 there is nothing to do."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_registers:
            raise InputError(
                f"num_registers must be 0 in the authors' forms, which have a null token; got "
                f"{self.num_registers}"
            )
        if self.softmax != "vanilla" or self.pathway:
            raise InputError(
                f"the authors' forms need softmax='vanilla' and pathway=False; got "
                f"softmax={self.softmax!r} and pathway={self.pathway}"
            )

    @property
    def num_unscored(self) -> int:
        return 1

    @property
    def nop_share(self) -> float:
        """Expected share of queries whose update must be zero: P(⟨x, v⟩ ≤ threshold)."""
        return 0.5 * (1 + math.erf(self.threshold / math.sqrt(2)))

    def fixed(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """The unit vector `direction`, v in the formula."""
        generator = generator or torch.Generator().manual_seed(self.seed)
        return {"direction": F.normalize(torch.randn(self.dim, generator=generator), dim=0)}

    def sample(
        self, generator: torch.Generator, count: int, fixed: Mapping[str, Tensor] | None = None
    ) -> TaskBatch:
        """Inputs, targets, and which tokens must stay as they are (never position 0)."""
        fixed = self.fixed() if fixed is None else fixed
        content = torch.randn(count, self.length, self.dim, generator=generator)
        nop = content @ fixed["direction"] <= self.threshold
        targets = torch.where(nop[..., None], content, self.gamma * content)
        inputs, targets = (F.pad(x, (0, 0, 1, 0)) for x in (content, targets))
        return TaskBatch(inputs, targets, F.pad(nop, (1, 0)))


@dataclass(frozen=True, kw_only=True)
class CausalDamping(ActiveDamping):
    r"""The authors' form for causal interventions, with a plain residual: $y = x + W_O A V$.

    Their result: the null token receives 0.993 of the NOP queries' attention and 0.012 of the
    active queries', its projected value has norm 0.063 against 7.87, and the error is 0.0187.

    Reference: "A Unifying View of Attention Sinks: Two Algorithms, Two Solutions", 2026,
    arXiv 2606.08105, and its authors' code.
    """

    def model(self, generator: torch.Generator) -> PositionalAttention:
        """The untrained model: one head on x + learned positions, added to x."""
        return PositionalAttention(self.dim, self.length + 1, gate=self.gate, generator=generator)


@dataclass(frozen=True, kw_only=True)
class SweepDamping(ActiveDamping):
    r"""The authors' form for sweeps over `threshold` and `gamma`: the residual is normalised.

    $$y = h + W_O A V, \quad h = \text{LayerNorm}(x + \text{position})$$

    Their result: at threshold 0 and gamma 0, position 0 receives 0.514 of the attention, the share
    of NOP queries; with nothing to damp (threshold 10) it receives 1/32.

    Reference: as for `CausalDamping`.
    """

    def model(self, generator: torch.Generator) -> PositionalAttention:
        """The untrained model: one head on h = LayerNorm(x + positions), added to h."""
        return PositionalAttention(
            self.dim, self.length + 1, gate=self.gate, normed=True, generator=generator
        )
