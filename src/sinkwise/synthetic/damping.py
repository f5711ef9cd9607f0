"""Conditional damping: the task whose head must sometimes do nothing, so it grows a NOP sink."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from sinkwise.errors import InputError
from sinkwise.synthetic.model import AttentionOnly, fit


@dataclass(frozen=True, kw_only=True)
class Damping:
    """Tokens flagged as aligned keep their state; the others receive the mean of all tokens.

    y_i = x_i + [i not aligned] * mean_j(M x_j), over tokens 1 to `length`. Token 0 is a constant
    null token e0 that the loss leaves out. Softmax cannot write nothing, so the head sends the
    aligned queries to the null token, whose value it makes zero: an adaptive NOP.

    Reference: "A Unifying View of Attention Sinks: Two Algorithms, Two Solutions", 2026,
    arXiv 2606.08105; this is a smaller, faster form of its task.
    """

    dim: int = 32
    """Width of a token, and of the single head."""
    length: int = 16
    """Content tokens of a sample; the null token comes on top."""
    batch: int = 64
    """Samples of a training step."""
    steps: int = 600
    """Training steps."""
    warmup_steps: int = 50
    """Steps until the learning rate is reached; it then falls to 0 along a cosine."""
    lr: float = 1e-2
    """Highest learning rate of AdamW."""
    aligned_share: float = 0.5
    """Probability that a content token is aligned, so that its update must be zero."""
    seed: int = 0
    """Seed of the fixed vectors, of the initial weights and of the training samples."""

    def __post_init__(self) -> None:
        if self.dim < 3 or self.length < 1:
            raise InputError(f"dim={self.dim} and length={self.length} must be at least 3 and 1")
        if not 0 <= self.aligned_share <= 1:
            raise InputError(f"aligned_share={self.aligned_share} must lie in [0, 1]")

    def fixed(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """What all samples share: orthogonal unit vectors `flag` u and `null` e0, and `mix` M.

        Drawn from `generator`; without one, from a new one at `seed`, as `train` does.
        """
        generator = generator or torch.Generator().manual_seed(self.seed)
        basis = torch.linalg.qr(torch.randn(self.dim, 2, generator=generator)).Q
        mix = torch.linalg.qr(torch.randn(self.dim, self.dim, generator=generator)).Q
        flag, null = basis.T.clone()
        return {"flag": flag, "null": null, "mix": mix}

    def sample(
        self, generator: torch.Generator, batch: int, fixed: Mapping[str, Tensor] | None = None
    ) -> tuple[
        Float[Tensor, "batch token dim"],
        Float[Tensor, "batch token dim"],
        Bool[Tensor, "batch token"],
    ]:
        """Inputs, targets, and which tokens are aligned (never the null token, at position 0).

        Content is orthogonal to the flag and to the null token: the head reads each of them alone.
        `fixed` stands in for `self.fixed()`.
        """
        fixed = self.fixed() if fixed is None else fixed
        flag, null = fixed["flag"], fixed["null"]
        content = torch.randn(batch, self.length, self.dim, generator=generator)
        for direction in (flag, null):
            content = content - (content @ direction)[..., None] * direction
        aligned = torch.rand(batch, self.length, generator=generator) < self.aligned_share
        sign = torch.where(aligned, 1.0, -1.0)[..., None]
        content = content + sign * 0.5 * math.sqrt(self.dim) * flag
        update = (content @ fixed["mix"].T).mean(1, keepdim=True) * ~aligned[..., None]
        first = math.sqrt(self.dim) * null.expand(batch, 1, -1)
        inputs = torch.cat([first, content], 1)
        targets = torch.cat([first, content + update], 1)
        return inputs, targets, F.pad(aligned, (1, 0))

    def model(self, generator: torch.Generator) -> AttentionOnly:
        """The untrained model: one layer of one head."""
        return AttentionOnly(self.dim, generator=generator)

    def train(self, progress: Callable[[int, float], None] | None = None) -> AttentionOnly:
        """The model after `steps` steps on the mean squared error of the content tokens."""
        generator = torch.Generator().manual_seed(self.seed)
        fixed = self.fixed(generator)
        model = self.model(generator)

        def loss() -> Float[Tensor, ""]:
            inputs, targets, _ = self.sample(generator, self.batch, fixed)
            return (model(inputs) - targets)[:, 1:].square().mean()

        fit(
            model,
            loss,
            steps=self.steps,
            warmup_steps=self.warmup_steps,
            lr=self.lr,
            progress=progress,
        )
        return model.eval()
