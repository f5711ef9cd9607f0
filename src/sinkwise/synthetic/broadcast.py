"""Broadcast: the task in which every token needs one token's payload, so a layer grows a hub."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkwise.errors import InputError
from sinkwise.synthetic.model import AttentionOnly, fit


@dataclass(frozen=True, kw_only=True)
class Broadcast:
    """A marked token p, at a random place, sends its payload to every token.

    y_i = x_i + M x_p. The hub, layer 0, sends all queries to p, and its update has rank one. The
    error after layer 0 joins the loss (deep supervision); without it the layers share the work
    and neither is a clean hub. Layer 1 is left with nothing to do and becomes a NOP: it looks at
    p too, but reads almost nothing there (projected value ratio about 0.1).

    Reference: "A Unifying View of Attention Sinks: Two Algorithms, Two Solutions", 2026,
    arXiv 2606.08105; this is a smaller, faster form of its task.
    """

    dim: int = 32
    """Width of a token, and of the single head."""
    length: int = 16
    """Tokens of a sample."""
    num_layers: int = 2
    """Layers of the model; layer 0 becomes the hub, the others learn to write almost nothing."""
    batch: int = 64
    """Samples of a training step."""
    steps: int = 400
    """Training steps."""
    warmup_steps: int = 50
    """Steps until the learning rate is reached; it then falls to 0 along a cosine."""
    lr: float = 1e-2
    """Highest learning rate of AdamW."""
    deep_weight: float = 0.3
    """Weight of the error after layer 0."""
    seed: int = 0
    """Seed of the fixed vectors, of the initial weights and of the training samples."""

    def __post_init__(self) -> None:
        if self.dim < 3 or self.length < 1:
            raise InputError(f"dim={self.dim} and length={self.length} must be at least 3 and 1")

    def fixed(self, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """What all samples share: orthogonal unit vectors `marker` and `common`, and `mix` M.

        M reads the content alone (M marker = M common = 0): a constant in the payload could be
        written by a layer that does not look for p. Every token holds `common`, without which no
        linear query would be the same for all. Drawn from `generator`; without one, from a new
        one at `seed`, as `train` does.
        """
        generator = generator or torch.Generator().manual_seed(self.seed)
        basis = torch.linalg.qr(torch.randn(self.dim, 2, generator=generator)).Q
        mix = torch.linalg.qr(torch.randn(self.dim, self.dim, generator=generator)).Q
        marker, common = basis.T.clone()
        return {"marker": marker, "common": common, "mix": mix - mix @ basis @ basis.T}

    def sample(
        self, generator: torch.Generator, batch: int, fixed: Mapping[str, Tensor] | None = None
    ) -> tuple[
        Float[Tensor, "batch token dim"],
        Float[Tensor, "batch token dim"],
        Int[Tensor, " batch"],
    ]:
        """Inputs, targets, and the position p of each sample's marked token.

        `fixed` stands in for `self.fixed()`.
        """
        fixed = self.fixed() if fixed is None else fixed
        marker, common = fixed["marker"], fixed["common"]
        content = torch.randn(batch, self.length, self.dim, generator=generator)
        for direction in (marker, common):
            content = content - (content @ direction)[..., None] * direction
        source = torch.randint(self.length, (batch,), generator=generator)
        rows = torch.arange(batch)
        inputs = content + 0.5 * math.sqrt(self.dim) * common
        inputs[rows, source] += 0.5 * math.sqrt(self.dim) * marker
        payload = inputs[rows, source] @ fixed["mix"].T
        return inputs, inputs + payload[:, None], source

    def model(self, generator: torch.Generator) -> AttentionOnly:
        """The untrained model: `num_layers` layers of one head."""
        return AttentionOnly(self.dim, num_layers=self.num_layers, generator=generator)

    def train(self, progress: Callable[[int, float], None] | None = None) -> AttentionOnly:
        """The model after `steps` steps on the mean squared errors of the first and last state."""
        generator = torch.Generator().manual_seed(self.seed)
        fixed = self.fixed(generator)
        model = self.model(generator)

        def loss() -> Float[Tensor, ""]:
            inputs, targets, _ = self.sample(generator, self.batch, fixed)
            states = model.states(inputs)
            first, last = ((state - targets).square().mean() for state in (states[0], states[-1]))
            return last + self.deep_weight * first

        fit(
            model,
            loss,
            steps=self.steps,
            warmup_steps=self.warmup_steps,
            lr=self.lr,
            progress=progress,
        )
        return model.eval()
