"""The smallest model that can grow a sink: attention and a residual, no norm, no MLP."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from sinkwise.errors import InputError

WEIGHT_STD = 0.1
"""Standard deviation of every weight at the start."""


def _linear(dim: int, generator: torch.Generator | None) -> nn.Linear:
    # skip_init leaves the global random state alone.
    linear = nn.utils.skip_init(nn.Linear, dim, dim, bias=False)
    nn.init.normal_(linear.weight, std=WEIGHT_STD, generator=generator)
    return linear


class Attention(nn.Module):
    """Multi-head attention over all tokens: o_proj(softmax(q k^T / sqrt(head_dim)) v)."""

    def __init__(self, dim: int, num_heads: int, generator: torch.Generator | None = None) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise InputError(f"dim={dim} must be a multiple of num_heads={num_heads}")
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            _linear(dim, generator) for _ in range(4)
        )

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch token dim"]:
        q, k, v = (
            proj(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(q, k, v)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class AttentionLayer(nn.Module):
    """x + attention(x)."""

    def __init__(self, dim: int, num_heads: int, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.attention = Attention(dim, num_heads, generator)

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch token dim"]:
        return x + self.attention(x)


class AttentionOnly(nn.Module):
    """A stack of attention layers, each added to the residual stream and nothing else.

    Weights start at N(0, 0.1²), drawn from `generator`. Raises InputError where `dim` is no
    multiple of `num_heads`.
    """

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int = 1,
        num_layers: int = 1,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if num_layers < 1:
            raise InputError(f"num_layers={num_layers} must be at least 1")
        self.layers = nn.ModuleList(
            AttentionLayer(dim, num_heads, generator) for _ in range(num_layers)
        )

    def states(self, x: Float[Tensor, "batch token dim"]) -> list[Float[Tensor, "batch token dim"]]:
        """The residual stream after each layer, first layer first."""
        states = []
        for layer in self.layers:
            x = layer(x)
            states.append(x)
        return states

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch token dim"]:
        return self.states(x)[-1]


def fit(
    model: nn.Module,
    loss: Callable[[], Float[Tensor, ""]],
    *,
    steps: int,
    warmup_steps: int,
    lr: float,
    progress: Callable[[int, float], None] | None = None,
) -> None:
    """Minimise `loss()`, which draws its own batch, with AdamW: linear warm-up, then cosine to 0.

    `progress(step, loss)` is called after every step.
    """

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        return 0.5 + 0.5 * math.cos(math.pi * (step - warmup_steps) / max(steps - warmup_steps, 1))

    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for step in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        schedule.step()
        if progress is not None:
            progress(step, value.item())
