"""Broadcast: the task in which every token needs one token's payload, so a layer grows a hub."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkwise.errors import InputError
from sinkwise.synthetic.model import AttentionOnly
from sinkwise.synthetic.positioned import PreNorm
from sinkwise.synthetic.task import Sample, Task, orthogonal_to

Modular = Literal["deep", "concave", "none"]

CONCAVE_FLOOR = 1e-4
"""Added to a layer's mean squared update before the fourth root, so that it has a slope at 0."""


@dataclass(frozen=True, kw_only=True)
class Broadcast(Task):
    """A marked token p, at a random place, sends its payload to every token: y_i = x_i + M x_p.

    The hub sends all queries to p, and its update has rank one. Left to itself the model shares
    the work between its layers. Two additions to the loss make one layer the hub:

    - `deep`: `deep_weight` times the error after layer 0 (deep supervision; layer 0 is the hub);
    - `concave`: `concave_weight` times the sum over layers of the fourth root of their mean
      squared update, which is least when one layer does everything.

    A layer that is left with nothing to do becomes a NOP: it looks at p too, but reads almost
    nothing there. With `local` a token sees itself and the registers alone, so the broadcast has
    to go through one.

    Reference: "A Unifying View of Attention Sinks: Two Algorithms, Two Solutions", 2026,
    arXiv 2606.08105; this is a smaller, faster form of its task.
    """

    steps: int = 400
    num_layers: int = 2
    """Layers of the model."""
    modular: Modular = "deep"
    """What makes one layer the hub: `deep`, `concave` or `none`."""
    deep_weight: float = 0.3
    """Weight of the error after layer 0."""
    concave_weight: float = 0.2
    """Weight of the concave penalty."""
    local: bool = False
    """Tokens see themselves and the registers alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.modular not in get_args(Modular):
            raise InputError(f"modular={self.modular!r} must be one of {get_args(Modular)}")

    def fixed(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """What all samples share: orthogonal unit vectors `marker` and `common`, and `mix` M.

        M reads the content alone (M marker = M common = 0): a constant in the payload could be
        written by a layer that does not look for p. Every token holds `common`, without which no
        linear query would be the same for all.
        """
        generator = generator or torch.Generator().manual_seed(self.seed)
        basis = torch.linalg.qr(torch.randn(self.dim, 2, generator=generator)).Q
        mix = torch.linalg.qr(torch.randn(self.dim, self.dim, generator=generator)).Q
        marker, common = basis.T.clone()
        return {"marker": marker, "common": common, "mix": mix - mix @ basis @ basis.T}

    def sample(
        self, generator: torch.Generator, batch: int, fixed: Mapping[str, Tensor] | None = None
    ) -> Sample:
        """Inputs, targets, and the position p of each sample's marked token."""
        fixed = self.fixed() if fixed is None else fixed
        marker, common = fixed["marker"], fixed["common"]
        content = torch.randn(batch, self.length, self.dim, generator=generator)
        content = orthogonal_to(content, marker, common)
        source = torch.randint(self.length, (batch,), generator=generator)
        rows = torch.arange(batch)
        inputs = content + 0.5 * math.sqrt(self.dim) * common
        inputs[rows, source] += 0.5 * math.sqrt(self.dim) * marker
        payload = inputs[rows, source] @ fixed["mix"].T
        return Sample(inputs, inputs + payload[:, None], source)

    def sink(self, sample: Sample) -> Int[Tensor, " batch"]:
        """Position p among the states; that of the register where all has to go through it."""
        return super().sink(sample) if self.local else sample.marks + self.num_registers

    def idle(self, sample: Sample) -> Bool[Tensor, "batch token"]:
        return torch.zeros(sample.inputs.shape[:2], dtype=torch.bool)

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

    def loss(self, model: Any, sample: Sample) -> Float[Tensor, ""]:
        """Mean squared error of the output, and what makes one layer the hub."""
        whole = model.states(sample.inputs)
        states = [model.content(state) for state in whole]
        error = (states[-1] - sample.targets).square().mean()
        if self.pathway:
            error = error + model.pathway_penalty(model.start(sample.inputs), whole)
        if self.modular == "deep":
            error = error + self.deep_weight * (states[0] - sample.targets).square().mean()
        if self.modular == "concave":
            updates = torch.stack([*states]) - torch.stack([sample.inputs, *states[:-1]])
            size = updates.square().mean((1, 2, 3))
            error = error + self.concave_weight * (size + CONCAVE_FLOOR).pow(0.25).sum()
        return error


@dataclass(frozen=True, kw_only=True)
class PreNormBroadcast(Task):
    """The authors' form: two pre-norm layers with MLPs; p is where <x, u> is largest.

    x ~ N(0, I), u a fixed unit vector, R a fixed orthogonal matrix; y_i = x_i + R x_p. Nothing
    marks p: a query has to find a maximum. Their result, seed 0: error 0.048, p is the maximum of
    the column in 95 % (layer 0) and 98 % (layer 1) of the samples, projected value ratio 0.98 and
    1.04; over seeds the error goes from 0.05 to 0.3.

    Reference: as of `Broadcast`, with its authors' code.
    """

    dim: int = 64
    length: int = 32
    batch: int = 1024
    steps: int = 6000
    decay: bool = False
    lr: float = 5e-4
    betas: tuple[float, float] = (0.9, 0.999)
    num_layers: int = 2
    """Layers of the model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_registers:
            raise InputError(f"num_registers={self.num_registers}: this form has none")
        if self.softmax != "vanilla" or self.pathway:
            raise InputError("softmax and pathway: the authors' forms have neither")

    def fixed(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """What all samples share: the unit vector `direction` u, and the orthogonal `mix` R."""
        generator = generator or torch.Generator().manual_seed(self.seed)
        direction = F.normalize(torch.randn(self.dim, generator=generator), dim=0)
        mix = torch.linalg.qr(torch.randn(self.dim, self.dim, generator=generator)).Q
        return {"direction": direction, "mix": mix}

    def sample(
        self, generator: torch.Generator, batch: int, fixed: Mapping[str, Tensor] | None = None
    ) -> Sample:
        """Inputs, targets, and the position p of each sample's largest <x, u>."""
        fixed = self.fixed() if fixed is None else fixed
        inputs = torch.randn(batch, self.length, self.dim, generator=generator)
        source = (inputs @ fixed["direction"]).argmax(1)
        payload = inputs[torch.arange(batch), source] @ fixed["mix"].T
        return Sample(inputs, inputs + payload[:, None], source)

    def sink(self, sample: Sample) -> Int[Tensor, " batch"]:
        return sample.marks

    def idle(self, sample: Sample) -> Bool[Tensor, "batch token"]:
        return torch.zeros(sample.inputs.shape[:2], dtype=torch.bool)

    def model(self, generator: torch.Generator) -> PreNorm:
        """The untrained model: `num_layers` pre-norm layers of one head."""
        return PreNorm(self.dim, self.num_layers, gate=self.gate, generator=generator)
