"""Conditional damping: the task whose head must sometimes do nothing, so it grows a NOP sink."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from sinkwise.errors import InputError
from sinkwise.synthetic.model import AttentionOnly
from sinkwise.synthetic.positioned import Positioned
from sinkwise.synthetic.task import Sample, Task, orthogonal_to


@dataclass(frozen=True, kw_only=True)
class Damping(Task):
    """The fast form: aligned tokens keep their state; the others receive the mean of all tokens.

    y_i = x_i + [i not aligned] * mean_j(M x_j), over the content tokens; a token's flag, a fixed
    direction of its input, says whether it is aligned. Softmax cannot write nothing, so the head
    sends the aligned queries to a token whose value it makes zero, an adaptive NOP: to the null
    token at position 0, a constant that the loss leaves out, or to a register.

    Reference: "A Unifying View of Attention Sinks: Two Algorithms, Two Solutions", 2026,
    arXiv 2606.08105; this is a smaller, faster form of its task.
    """

    aligned_share: float = 0.5
    """Probability that a content token is aligned, so that its update must be zero."""
    null_norm: float | None = 0.25
    """Length of the null token in units of sqrt(dim), a content token's own; None: no such token.
    A long one (1) is so easy to point at that a gate does not replace it."""
    common_norm: float = 0.0
    """Length, in units of sqrt(dim), of a direction that all content tokens share. Without one no
    query can turn from all of them at once, and a sink logit has nothing to rise above."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.aligned_share <= 1:
            raise InputError(f"aligned_share={self.aligned_share} must lie in [0, 1]")
        if self.null_norm is not None and self.null_norm <= 0:
            raise InputError(f"null_norm={self.null_norm} must be positive, or None")
        if self.common_norm < 0:
            raise InputError(f"common_norm={self.common_norm} must not be negative")

    @property
    def scored(self) -> int:
        return 0 if self.null_norm is None else 1

    def fixed(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """What all samples share: orthogonal unit vectors `flag` u, `null` e0 and, with a
        `common_norm`, `common`; and `mix` M.
        """
        generator = generator or torch.Generator().manual_seed(self.seed)
        names = ("flag", "null", "common") if self.common_norm else ("flag", "null")
        basis = torch.linalg.qr(torch.randn(self.dim, len(names), generator=generator)).Q
        mix = torch.linalg.qr(torch.randn(self.dim, self.dim, generator=generator)).Q
        return {**dict(zip(names, basis.T.clone(), strict=True)), "mix": mix}

    def sample(
        self, generator: torch.Generator, batch: int, fixed: Mapping[str, Tensor] | None = None
    ) -> Sample:
        """Inputs, targets, and which tokens are aligned (never the null token, at position 0).

        Content is orthogonal to the flag, the null token and what is common: the head reads each of
        them alone.
        """
        fixed = self.fixed() if fixed is None else fixed
        flag, null = fixed["flag"], fixed["null"]
        content = torch.randn(batch, self.length, self.dim, generator=generator)
        common = [fixed["common"]] if self.common_norm else []
        content = orthogonal_to(content, flag, null, *common)
        aligned = torch.rand(batch, self.length, generator=generator) < self.aligned_share
        sign = torch.where(aligned, 1.0, -1.0)[..., None]
        content = content + sign * 0.5 * math.sqrt(self.dim) * flag
        for direction in common:
            content = content + self.common_norm * math.sqrt(self.dim) * direction
        update = (content @ fixed["mix"].T).mean(1, keepdim=True) * ~aligned[..., None]
        if self.null_norm is None:
            return Sample(content, content + update, aligned)
        first = self.null_norm * math.sqrt(self.dim) * null.expand(batch, 1, -1)
        inputs = torch.cat([first, content], 1)
        targets = torch.cat([first, content + update], 1)
        return Sample(inputs, targets, F.pad(aligned, (1, 0)))

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

    def loss(self, model: Any, sample: Sample) -> Float[Tensor, ""]:
        if not self.pathway:
            return super().loss(model, sample)
        states = model.states(sample.inputs)
        wrong = model.content(states[-1]) - sample.targets
        error = wrong[:, self.scored :].square().mean()
        return error + model.pathway_penalty(model.start(sample.inputs), states)


@dataclass(frozen=True, kw_only=True)
class ActiveDamping(Task):
    """What the authors' two forms share: a token is active when <x, v> > `threshold`.

    x ~ N(0, I), v a fixed unit vector. An active token must end as `gamma` x, so the head must
    cancel its residual; the others must stay as they are. Position 0 has no content and no loss.
    """

    dim: int = 64
    length: int = 32
    batch: int = 1024
    steps: int = 2000
    decay: bool = False
    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 1e-4
    threshold: float = 0.0
    """lambda: from 4 on hardly any token is active, and there is nothing to do."""
    gamma: float = 0.0
    """What is left of an active token; at 1 there is nothing to do."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_registers:
            raise InputError(
                f"num_registers={self.num_registers}: this form has its own null token"
            )
        if self.softmax != "vanilla" or self.pathway:
            raise InputError("softmax and pathway: the authors' forms have neither")

    @property
    def scored(self) -> int:
        return 1

    @property
    def nop_share(self) -> float:
        """Expected share of queries that must get nothing: P(<x, v> <= threshold)."""
        return 0.5 * (1 + math.erf(self.threshold / math.sqrt(2)))

    def fixed(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """What all samples share: the unit vector `direction` v."""
        generator = generator or torch.Generator().manual_seed(self.seed)
        return {"direction": F.normalize(torch.randn(self.dim, generator=generator), dim=0)}

    def sample(
        self, generator: torch.Generator, batch: int, fixed: Mapping[str, Tensor] | None = None
    ) -> Sample:
        """Inputs, targets, and which tokens must stay as they are (never position 0)."""
        fixed = self.fixed() if fixed is None else fixed
        content = torch.randn(batch, self.length, self.dim, generator=generator)
        nop = content @ fixed["direction"] <= self.threshold
        targets = torch.where(nop[..., None], content, self.gamma * content)
        inputs, targets = (F.pad(x, (0, 0, 1, 0)) for x in (content, targets))
        return Sample(inputs, targets, F.pad(nop, (1, 0)))


@dataclass(frozen=True, kw_only=True)
class CausalDamping(ActiveDamping):
    """The authors' form for causal edits: a true residual, y = x + W_O(A V).

    Their result: the null token gets 0.993 of the NOP queries' attention and 0.012 of the active
    ones', projected value norm 0.063 against 7.87, error 0.0187.

    Reference: "A Unifying View of Attention Sinks: Two Algorithms, Two Solutions", 2026,
    arXiv 2606.08105, and its authors' code.
    """

    def model(self, generator: torch.Generator) -> Positioned:
        """The untrained model: one head that reads x + learned vectors and adds to x."""
        return Positioned(self.dim, self.length + 1, gate=self.gate, generator=generator)


@dataclass(frozen=True, kw_only=True)
class SweepDamping(ActiveDamping):
    """The authors' form for sweeps over `threshold` and `gamma`: y = h + W_O(A V) with
    h = LayerNorm(x + position).

    Their result: at threshold 0 and gamma 0 position 0 gets 0.514 of the attention, the share of
    NOP queries; with nothing to damp (threshold 10) it gets 1/32.

    Reference: as of `CausalDamping`.
    """

    def model(self, generator: torch.Generator) -> Positioned:
        """The untrained model: one head that reads LayerNorm(x + position) and adds to it."""
        return Positioned(
            self.dim, self.length + 1, gate=self.gate, normed=True, generator=generator
        )
