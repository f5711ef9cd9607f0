"""The base class of all synthetic tasks: data, model, loss and training in one frozen object."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from sinkwise.errors import InputError
from sinkwise.nn.gate import GateKind
from sinkwise.nn.softmax import SoftmaxType


class TaskBatch(NamedTuple):
    """A batch of samples of a task."""

    inputs: Float[Tensor, "batch token dim"]
    targets: Float[Tensor, "batch token dim"]
    marks: Tensor
    """Damping: Bool[batch token], True for queries whose update must be zero.

    Broadcast: Int[batch], the position of the token that is broadcast."""


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """Data, model, loss and training of a minimal experiment; `seed` determines everything."""

    summary: ClassVar[str]
    """The task in plain words, for pages."""

    dim: int = 32
    """Width of a token, and of the single head."""
    length: int = 16
    """Content tokens per sample."""
    batch: int = 64
    """Samples per training step."""
    steps: int = 600
    """Training steps."""
    warmup_steps: int = 50
    """Steps of the linear warm-up to `lr`."""
    decay: bool = True
    """Whether the learning rate then decays to 0 along a cosine; otherwise it stays constant."""
    lr: float = 1e-2
    """Peak learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Decay rates of AdamW's two moments."""
    weight_decay: float = 1e-2
    """Weight decay of AdamW."""
    gate: GateKind | None = None
    """Output gate on every head: `elementwise`, `headwise`, or None."""
    num_registers: int = 0
    """Learned tokens prepended to the sequence."""
    softmax: SoftmaxType = "vanilla"
    """Extra term in the softmax's denominator: none, 1 (`off-by-one`) or a learned logit
    (`learnable`)."""
    pathway: bool = False
    """Whether every layer has a global pathway, with its penalty in the loss."""
    seed: int = 0
    """Seed of the fixed vectors, the initial weights and the training samples."""

    def __post_init__(self) -> None:
        if self.dim < 3 or self.length < 1:
            raise InputError(f"dim={self.dim} and length={self.length} must be at least 3 and 1")
        if self.steps < 1 or self.batch < 1:
            raise InputError(f"steps={self.steps} and batch={self.batch} must be at least 1")

    @property
    def num_unscored(self) -> int:
        """Number of leading tokens that the loss ignores: they exist to be attended to."""
        return 0

    @abstractmethod
    def fixed(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """The vectors and matrices that all samples share.

        Drawn from `generator`; without one, from a new generator at `seed`, as in `train`.
        """

    @abstractmethod
    def sample(
        self, generator: torch.Generator, count: int, fixed: Mapping[str, Tensor] | None = None
    ) -> TaskBatch:
        """A batch of `count` samples; `fixed` replaces `self.fixed()`."""

    def sink(self, batch: TaskBatch) -> Int[Tensor, " batch"]:
        """The position at which theory expects each sample's sink, counted with the registers.

        Position 0 unless a task says otherwise: the null token or the register.
        """
        return torch.zeros(len(batch.inputs), dtype=torch.int64)

    def idle(self, batch: TaskBatch) -> Bool[Tensor, "batch token"]:
        """The queries whose update must be zero."""
        return batch.marks

    @abstractmethod
    def model(self, generator: torch.Generator) -> Any:
        """The untrained model."""

    def loss(self, model: Any, batch: TaskBatch) -> Float[Tensor, ""]:
        """Mean squared error, without the first `num_unscored` tokens."""
        return (model(batch.inputs) - batch.targets)[:, self.num_unscored :].square().mean()

    def train(self, progress: Callable[[int, float], None] | None = None) -> Any:
        """The model after `steps` steps, in eval mode; calls `progress(step, loss)` after each."""
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
    """Minimise `loss()`, which draws its own batch, with AdamW.

    The learning rate rises linearly for `warmup_steps`, then stays constant or, with `decay`,
    decays to 0 along a cosine. `progress(step, loss)` is called after every step.
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
    """x minus its components along orthogonal unit `directions`."""
    for direction in directions:
        x = x - (x @ direction)[..., None] * direction
    return x
