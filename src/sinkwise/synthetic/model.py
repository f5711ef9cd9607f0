"""The smallest models that can learn a sink: attention and a residual stream, nothing else."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from sinkwise.errors import InputError
from sinkwise.nn.gate import GateKind, OutputGate
from sinkwise.nn.global_pathway import GlobalPathway, common_mode_penalty
from sinkwise.nn.linear import linear
from sinkwise.nn.registers import RegisterTokens
from sinkwise.nn.sink_logit import SinkLogitAttention, sink_attention
from sinkwise.nn.softmax import SoftmaxType

WEIGHT_STD = 0.1
"""Standard deviation of every initial weight."""


class Attention(nn.Module):
    r"""Multi-head attention over all tokens: $W_O (g \odot \text{softmax}(q k^T / \sqrt{d_h}) v)$.

    `gate` selects the output gate $g$; None for no gate. `softmax` is `vanilla`, `off-by-one` (adds
    1 to the denominator) or `learnable` (one sink logit per head, initially 0).
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 1,
        *,
        gate: GateKind | None = None,
        softmax: SoftmaxType = "vanilla",
        std: float = WEIGHT_STD,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise InputError(f"dim={dim} must be a multiple of num_heads={num_heads}, at least 1")
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            linear(dim, dim, bias=False, std=std, generator=generator, device=None, dtype=None)
            for _ in range(4)
        )
        self.gate = None
        if gate is not None:
            self.gate = OutputGate(dim, num_heads, kind=gate, generator=generator)
        self.softmax = softmax
        self.sink = SinkLogitAttention(num_heads) if softmax == "learnable" else None

    def forward(
        self,
        x: Float[Tensor, "batch token dim"],
        allowed: Bool[Tensor, "token token"] | None = None,
    ) -> Float[Tensor, "batch token dim"]:
        q, k, v = (
            proj(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.softmax == "vanilla":
            heads = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        else:
            mask = None if allowed is None else allowed[None, None]
            heads = sink_attention(q, k, v, self.sink_logit(q), attn_mask=mask)
        heads = heads.transpose(1, 2).flatten(2)
        if self.gate is not None:
            heads = self.gate(heads, x)
        return self.o_proj(heads)

    def sink_logit(self, like: Tensor) -> Float[Tensor, " head"]:
        """The logit of each head that adds exp(logit) to its denominator; not for `vanilla`."""
        return like.new_zeros(self.num_heads) if self.sink is None else self.sink.logit.to(like)


class AttentionLayer(nn.Module):
    """x + attention(x), plus pathway(x) if there is a pathway."""

    def __init__(self, attention: Attention, pathway: GlobalPathway | None = None) -> None:
        super().__init__()
        self.attention = attention
        self.pathway = pathway

    def forward(
        self,
        x: Float[Tensor, "batch token dim"],
        allowed: Bool[Tensor, "token token"] | None = None,
    ) -> Float[Tensor, "batch token dim"]:
        out = x + self.attention(x, allowed)
        return out if self.pathway is None else out + self.pathway(x)


class AttentionOnly(nn.Module):
    r"""A stack of attention layers on a residual stream, without norms, MLPs or positions.

    `num_registers` learned tokens are prepended to the sequence; the states contain them, the
    output does not. With `local` a token sees only itself and the registers, and registers see all
    tokens. With `pathway` every layer has a global pathway parallel to its attention. The initial
    weights are drawn from $N(0, 0.1^2)$ with `generator`.

    Raises InputError if `dim` is not a multiple of `num_heads`, or if a count is too small.
    """

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int = 1,
        num_layers: int = 1,
        gate: GateKind | None = None,
        softmax: SoftmaxType = "vanilla",
        num_registers: int = 0,
        local: bool = False,
        pathway: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if num_layers < 1:
            raise InputError(f"num_layers={num_layers} must be at least 1")
        if num_registers < 0:
            raise InputError(f"num_registers={num_registers} must be at least 0")
        self.local = local
        self.layers = nn.ModuleList(
            AttentionLayer(
                Attention(dim, num_heads, gate=gate, softmax=softmax, generator=generator),
                GlobalPathway(dim, generator=generator) if pathway else None,
            )
            for _ in range(num_layers)
        )
        self.registers = None
        if num_registers:
            self.registers = RegisterTokens(num_registers, dim, std=WEIGHT_STD, generator=generator)

    @property
    def num_registers(self) -> int:
        """Number of learned tokens prepended to the sequence."""
        return 0 if self.registers is None else self.registers.count

    def start(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch longer dim"]:
        """The residual stream before the first layer."""
        return x if self.registers is None else self.registers(x)

    def states(
        self, x: Float[Tensor, "batch token dim"]
    ) -> list[Float[Tensor, "batch longer dim"]]:
        """The residual stream after each layer, in order, registers included."""
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

    def pathway_penalty(
        self, start: Float[Tensor, "batch longer dim"], states: Sequence[Tensor]
    ) -> Float[Tensor, ""]:
        """Sum over layers with a pathway of the common-mode penalty on attention's update.

        `start` is the residual stream before the first layer, `states` that after each layer.
        """
        total = start.new_zeros(())
        for layer, before, after in zip(self.layers, [start, *states[:-1]], states, strict=True):
            assert isinstance(layer, AttentionLayer)
            if layer.pathway is not None:
                total = total + common_mode_penalty(after - before - layer.pathway(before))
        return total

    def content(self, state: Float[Tensor, "batch longer dim"]) -> Float[Tensor, "batch token dim"]:
        """A state without the registers."""
        return state if self.registers is None else self.registers.drop(state)

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch token dim"]:
        return self.content(self.states(x)[-1])
