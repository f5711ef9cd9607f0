"""What all synthetic tasks share: one frozen object is data, model, loss and training."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from sinkwise.errors import InputError
from sinkwise.nn.gate import GateKind
from sinkwise.nn.softmax import SoftmaxType


class Sample(NamedTuple):
    """A batch of a task."""

    inputs: Float[Tensor, "batch token dim"]
    targets: Float[Tensor, "batch token dim"]
    marks: Tensor
    """Damping: Bool[batch token], queries that must get nothing. Broadcast: Int[batch], the place
    of the token that is sent to all."""


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """Data, model, loss and training of one minimal experiment; everything follows from `seed`."""

    dim: int = 32
    """Width of a token, and of the single head."""
    length: int = 16
    """Content tokens of a sample."""
    batch: int = 64
    """Samples of a training step."""
    steps: int = 600
    """Training steps."""
    warmup_steps: int = 50
    """Steps until the learning rate is reached."""
    decay: bool = True
    """The learning rate then falls to 0 along a cosine; else it stays."""
    lr: float = 1e-2
    """Highest learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Decay of AdamW's two moments."""
    weight_decay: float = 1e-2
    """Weight decay of AdamW."""
    gate: GateKind | None = None
    """Output gate on every head: `elementwise`, `headwise`, or none."""
    num_registers: int = 0
    """Learned tokens before the sequence."""
    softmax: SoftmaxType = "vanilla"
    """What joins the softmax's denominator: nothing, 1, or a learned logit."""
    pathway: bool = False
    """A global pathway beside every attention, with its penalty in the loss."""
    seed: int = 0
    """Seed of the fixed vectors, of the initial weights and of the training samples."""

    def __post_init__(self) -> None:
        if self.dim < 3 or self.length < 1:
            raise InputError(f"dim={self.dim} and length={self.length} must be at least 3 and 1")
        if self.steps < 1 or self.batch < 1:
            raise InputError(f"steps={self.steps} and batch={self.batch} must be at least 1")

    @property
    def scored(self) -> int:
        """First token that the loss reads; those before are there to be looked at."""
        return 0

    @abstractmethod
    def fixed(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """What all samples share, drawn from `generator`; without one, from a new one at `seed`,
        as `train` does.
        """

    @abstractmethod
    def sample(
        self, generator: torch.Generator, batch: int, fixed: Mapping[str, Tensor] | None = None
    ) -> Sample:
        """A batch; `fixed` stands in for `self.fixed()`."""

    def sink(self, sample: Sample) -> Int[Tensor, " batch"]:
        """Where each sample's sink should be, among the positions of the states: at 0, the null
        token or the register.
        """
        return torch.zeros(len(sample.inputs), dtype=torch.int64)

    def idle(self, sample: Sample) -> Bool[Tensor, "batch token"]:
        """The queries that must get nothing."""
        return sample.marks

    @abstractmethod
    def model(self, generator: torch.Generator) -> Any:
        """The untrained model."""

    def loss(self, model: Any, sample: Sample) -> Float[Tensor, ""]:
        """Mean squared error of the tokens from `scored` on."""
        return (model(sample.inputs) - sample.targets)[:, self.scored :].square().mean()

    def train(self, progress: Callable[[int, float], None] | None = None) -> Any:
        """The model after `steps` steps, in eval mode; `progress(step, loss)` after each one."""
        generator = torch.Generator().manual_seed(self.seed)
        fixed = self.fixed(generator)
        model = self.model(generator)
        fit(
            model,
            lambda: self.loss(model, self.sample(generator, self.batch, fixed)),
            steps=self.steps,
            warmup_steps=self.warmup_steps,
            decay=self.decay,
            lr=self.lr,
            betas=self.betas,
            weight_decay=self.weight_decay,
            progress=progress,
        )
        return model.eval()


def fit(
    model: nn.Module,
    loss: Callable[[], Float[Tensor, ""]],
    *,
    steps: int,
    warmup_steps: int,
    decay: bool,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    progress: Callable[[int, float], None] | None = None,
) -> None:
    """Minimise `loss()`, which draws its own batch, with AdamW: linear warm-up, then constant, or
    with `decay` along a cosine to 0.

    `progress(step, loss)` is called after every step.
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        if not decay:
            return 1.0
        return 0.5 + 0.5 * math.cos(math.pi * (step - warmup_steps) / max(steps - warmup_steps, 1))

    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=betas, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for step in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        schedule.step()
        if progress is not None:
            progress(step, value.item())


def orthogonal_to(
    x: Float[Tensor, "*batch dim"], *directions: Float[Tensor, " dim"]
) -> Float[Tensor, "*batch dim"]:
    """x without its parts along orthogonal unit `directions`."""
    for direction in directions:
        x = x - (x @ direction)[..., None] * direction
    return x
