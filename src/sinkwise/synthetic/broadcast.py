"""Broadcast: a task in which every token needs one token's payload, so that a layer sends it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkwise.errors import InputError
from sinkwise.synthetic.model import AttentionOnly
from sinkwise.synthetic.task import Task, TaskBatch, orthogonal_to

Modular = Literal["deep", "concave", "none"]

CONCAVE_FLOOR = 1e-4
"""Added to a layer's mean squared update before the fourth root, which keeps its slope finite."""


@dataclass(frozen=True, kw_only=True)
class Broadcast(Task):
    r"""The fast form: a marked token $p$ at a random position must send its payload to all tokens.

    $$y_i = x_i + M x_p$$

    All queries of the layer that does this, the hub, attend to $p$, and its update has rank one.
    Without further terms in the loss the model splits the work between its layers. Two terms
    concentrate it in one:

    - `deep`: `deep_weight` times the error after layer 0 (deep supervision; layer 0 is the hub);
    - `concave`: `concave_weight` times $\sum_l u_l^{1/4}$ with the mean squared update $u_l$ of
      layer $l$, which is smallest if one layer writes everything.

    A layer with nothing left to do becomes a NOP: it attends to $p$ too, but with almost no value
    there. With `local` a token sees only itself and the registers, so that the broadcast must go
    through a register.

    Reference: "A Unifying View of Attention Sinks: Two Algorithms, Two Solutions", 2026,
    arXiv 2606.08105; this is a smaller and faster form of its task.
    """

    summary: ClassVar[str] = (
        "One marked token p, at a random position, must send its payload to every token: "
        "yᵢ = xᵢ + M xₚ. The layer that does this, the hub, attends to p with all its queries and "
        "writes the same update to every token: a broadcast. A layer with nothing left to do "
        "becomes a NOP. In the form “local” a token sees only itself and a register, so that the "
        "broadcast must go through the register."
    )

    steps: int = 400
    num_layers: int = 2
    """Layers of the model."""
    modular: Modular = "deep"
    """The loss term that concentrates the work in one layer: `deep`, `concave` or `none`."""
    deep_weight: float = 0.3
    """Weight of the error after layer 0."""
    concave_weight: float = 0.2
    """Weight of the concave penalty."""
    local: bool = False
    """Whether tokens see only themselves and the registers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.modular not in get_args(Modular):
            known = ", ".join(get_args(Modular))
            raise InputError(f"modular={self.modular!r} must be one of {known}")

    def fixed(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """The orthogonal unit vectors `marker` and `common`, and the matrix `mix`, M above.

        M ignores both (M marker = M common = 0): a layer could write a constant part of the payload
        without attending to p. Every token contains `common`; without it no linear map could give
        all tokens the same query.
        """
        generator = generator or torch.Generator().manual_seed(self.seed)
        basis = torch.linalg.qr(torch.randn(self.dim, 2, generator=generator)).Q
        mix = torch.linalg.qr(torch.randn(self.dim, self.dim, generator=generator)).Q
        marker, common = basis.T.clone()
        return {"marker": marker, "common": common, "mix": mix - mix @ basis @ basis.T}

    def sample(
        self, generator: torch.Generator, count: int, fixed: Mapping[str, Tensor] | None = None
    ) -> TaskBatch:
        """Inputs, targets, and the position p of each sample's marked token."""
        fixed = self.fixed() if fixed is None else fixed
        marker, common = fixed["marker"], fixed["common"]
        content = torch.randn(count, self.length, self.dim, generator=generator)
        content = orthogonal_to(content, marker, common)
        source = torch.randint(self.length, (count,), generator=generator)
        rows = torch.arange(count)
        inputs = content + 0.5 * math.sqrt(self.dim) * common
        inputs[rows, source] += 0.5 * math.sqrt(self.dim) * marker
        payload = inputs[rows, source] @ fixed["mix"].T
        return TaskBatch(inputs, inputs + payload[:, None], source)

    def sink(self, batch: TaskBatch) -> Int[Tensor, " batch"]:
        """Position p, or with `local` the register's; registers are counted."""
        return super().sink(batch) if self.local else batch.marks + self.num_registers

    def idle(self, batch: TaskBatch) -> Bool[Tensor, "batch token"]:
        """No query: every token needs the payload."""
        return torch.zeros(batch.inputs.shape[:2], dtype=torch.bool)

    def model(self, generator: torch.Generator) -> AttentionOnly:
        """The untrained model: `num_layers` layers of one head."""
        return AttentionOnly(
            self.dim,
            num_layers=self.num_layers,
            gate=self.gate,
            softmax=self.softmax,
            num_registers=self.num_registers,
            local=self.local,
            pathway=self.pathway,
            generator=generator,
        )

    def loss(self, model: Any, batch: TaskBatch) -> Float[Tensor, ""]:
        """Mean squared error of the output, and the term of `modular`."""
        full_states = model.states(batch.inputs)
        states = [model.content(state) for state in full_states]
        loss = (states[-1] - batch.targets).square().mean()
        if self.pathway:
            loss = loss + model.pathway_penalty(model.start(batch.inputs), full_states)
        if self.modular == "deep":
            loss = loss + self.deep_weight * (states[0] - batch.targets).square().mean()
        if self.modular == "concave":
            updates = torch.stack([*states]) - torch.stack([batch.inputs, *states[:-1]])
            size = updates.square().mean((1, 2, 3))
            loss = loss + self.concave_weight * (size + CONCAVE_FLOOR).pow(0.25).sum()
        return loss
