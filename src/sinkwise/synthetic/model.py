"""The smallest models that can grow a sink: attention and a residual, nothing else."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from sinkwise.errors import InputError
from sinkwise.nn.gate import GateKind, OutputGate
from sinkwise.nn.registers import Registers

WEIGHT_STD = 0.1
"""Standard deviation of every weight at the start."""


def _linear(inputs: int, outputs: int, generator: torch.Generator | None, std: float) -> nn.Linear:
    # skip_init leaves the global random state alone.
    linear = nn.utils.skip_init(nn.Linear, inputs, outputs, bias=False)
    nn.init.normal_(linear.weight, std=std, generator=generator)
    return linear


class Attention(nn.Module):
    """Multi-head attention over all tokens: o_proj(gate(softmax(q k^T / sqrt(head_dim)) v))."""

    def __init__(
        self,
        dim: int,
        num_heads: int = 1,
        *,
        gate: GateKind | None = None,
        std: float = WEIGHT_STD,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise InputError(f"dim={dim} must be a multiple of num_heads={num_heads}")
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            _linear(dim, dim, generator, std) for _ in range(4)
        )
        self.gate = None
        if gate is not None:
            self.gate = OutputGate(dim, num_heads, kind=gate, generator=generator)

    def forward(
        self,
        x: Float[Tensor, "batch token dim"],
        allowed: Bool[Tensor, "token token"] | None = None,
    ) -> Float[Tensor, "batch token dim"]:
        q, k, v = (
            proj(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        heads = heads.transpose(1, 2).flatten(2)
        if self.gate is not None:
            heads = self.gate(heads, x)
        return self.o_proj(heads)


class AttentionLayer(nn.Module):
    """x + attention(x)."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention

    def forward(
        self,
        x: Float[Tensor, "batch token dim"],
        allowed: Bool[Tensor, "token token"] | None = None,
    ) -> Float[Tensor, "batch token dim"]:
        return x + self.attention(x, allowed)


class AttentionOnly(nn.Module):
    """A stack of attention layers, each added to the residual stream and nothing else.

    `num_registers` learned tokens go before the sequence; they are part of the states and not of
    the output. With `local` a token sees itself and the registers alone, and registers see all.
    Weights start at N(0, 0.1²), drawn from `generator`. Raises InputError where `dim` is no
    multiple of `num_heads`, or a count is too small.
    """

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int = 1,
        num_layers: int = 1,
        gate: GateKind | None = None,
        num_registers: int = 0,
        local: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if num_layers < 1:
            raise InputError(f"num_layers={num_layers} must be at least 1")
        if num_registers < 0:
            raise InputError(f"num_registers={num_registers} must not be negative")
        self.local = local
        self.layers = nn.ModuleList(
            AttentionLayer(Attention(dim, num_heads, gate=gate, generator=generator))
            for _ in range(num_layers)
        )
        self.registers = None
        if num_registers:
            self.registers = Registers(num_registers, dim, std=WEIGHT_STD, generator=generator)

    @property
    def num_registers(self) -> int:
        """Learned tokens before the sequence."""
        return 0 if self.registers is None else self.registers.count

    def start(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch longer dim"]:
        """The residual stream before the first layer."""
        return x if self.registers is None else self.registers(x)

    def states(
        self, x: Float[Tensor, "batch token dim"]
    ) -> list[Float[Tensor, "batch longer dim"]]:
        """The residual stream after each layer, first layer first, registers included."""
        x = self.start(x)
        allowed = None
        if self.local:
            allowed = torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
            allowed[:, : self.num_registers] = True
            allowed[: self.num_registers] = True
        states = []
        for layer in self.layers:
            x = layer(x, allowed)
            states.append(x)
        return states

    def content(self, state: Float[Tensor, "batch longer dim"]) -> Float[Tensor, "batch token dim"]:
        """A state without the registers."""
        return state if self.registers is None else self.registers.drop(state)

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch token dim"]:
        return self.content(self.states(x)[-1])
