"""Multi-head attention with an output gate, a sink logit, or both."""

from typing import Any, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from sinkwise.errors import InputError
from sinkwise.nn.gate import GateKind, OutputGate
from sinkwise.nn.linear import DeviceLike, linear
from sinkwise.nn.padding import check_real
from sinkwise.nn.sink_logit import SinkLogitAttention, sink_attention
from sinkwise.nn.softmax import SoftmaxType

WEIGHT_STD = 0.02
"""Initial standard deviation of every projection; biases start at 0."""


class GatedAttention(nn.Module):
    r"""Multi-head attention with a gate on the heads' outputs and a choice of softmax.

    $$
    W_O\left(\operatorname{concat}_h(A_h V_h) \odot \sigma(W_g x + b)\right),\qquad
    A_h = \operatorname{softmax}\left(\frac{Q_h K_h^\top}{\sqrt{d_h}}\right)
    $$

    $x$ is the block's normed input. `gate` is `elementwise`, `headwise` or None. `softmax` is
    `vanilla`, `off-by-one` (1 is added to the denominator) or `learnable` (the exponential of a
    logit per head, which starts at 0). Heads are grouped if `num_kv_heads` is given. Attention runs
    in fused kernels and keeps no map. `dropout_p` drops attention weights in training.

    forward(x, real): `real` is False for padding, which is not attended to. A query that sees no
    token gets heads of 0. Causal attention with `real` needs an explicit mask, [batch 1 token
    token] bool.

    State dict: `q_proj`, `k_proj`, `v_proj`, `o_proj` with `.weight` (and `.bias`), rows ordered by
    head as in transformers' Llama and Qwen; `gate.proj.weight`, `gate.proj.bias`; `sink.logit` if
    it is learned. With `vanilla`, `qkv_bias` adds no `k_proj.bias`: it would shift all scores of a
    query alike, which changes no softmax, and would never get a gradient. Projections start as
    draws from $N(0, 0.02^2)$ and the gate as in `OutputGate`, all drawn from `generator`.

    Raises InputError for sizes that do not divide, an unknown gate or softmax, a dropout outside
    [0, 1), and if `real` is not bool [batch token].

    Reference: Qiu et al., 2025, arXiv 2505.06708 (gate); OpenAI, 2025, arXiv 2508.10925 (logit).
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        gate: GateKind | None = "elementwise",
        softmax: SoftmaxType = "vanilla",
        is_causal: bool = False,
        dropout_p: float = 0.0,
        qkv_bias: bool = False,
        out_bias: bool = False,
        generator: torch.Generator | None = None,
        device: DeviceLike = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """By default `head_dim` is dim // num_heads, and `num_kv_heads` is num_heads.

        `device` and `dtype` as in torch's modules; `generator` must be on that device.
        """
        super().__init__()
        if num_heads < 1 or (head_dim is None and dim % num_heads):
            raise InputError(f"dim={dim} must be a multiple of num_heads={num_heads}")
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if kv_heads < 1 or num_heads % kv_heads:
            raise InputError(f"num_heads={num_heads} must be a multiple of num_kv_heads={kv_heads}")
        if softmax not in get_args(SoftmaxType):
            raise InputError(
                f"softmax={softmax!r} must be one of {', '.join(get_args(SoftmaxType))}"
            )
        if not 0.0 <= dropout_p < 1.0:
            raise InputError(f"dropout_p={dropout_p} must be at least 0 and below 1")
        self.num_heads, self.num_kv_heads = num_heads, kv_heads
        self.head_dim = dim // num_heads if head_dim is None else head_dim
        self.softmax, self.is_causal, self.dropout_p = softmax, is_causal, dropout_p
        inner, kv_inner = num_heads * self.head_dim, kv_heads * self.head_dim
        key_bias = qkv_bias and softmax != "vanilla"
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        drawn: dict[str, Any] = {"generator": generator, **factory}
        self.q_proj = linear(dim, inner, bias=qkv_bias, std=WEIGHT_STD, **drawn)
        self.k_proj = linear(dim, kv_inner, bias=key_bias, std=WEIGHT_STD, **drawn)
        self.v_proj = linear(dim, kv_inner, bias=qkv_bias, std=WEIGHT_STD, **drawn)
        self.o_proj = linear(inner, dim, bias=out_bias, std=WEIGHT_STD, **drawn)
        self.gate = None
        if gate is not None:
            self.gate = OutputGate(inner, num_heads, in_dim=dim, kind=gate, **drawn)
        self.sink = SinkLogitAttention(num_heads, **factory) if softmax == "learnable" else None

    def forward(
        self,
        x: Float[Tensor, "batch token dim"],
        real: Bool[Tensor, "batch token"] | None = None,
    ) -> Float[Tensor, "batch token dim"]:
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        heads = self._attend(q, k, v, real if real is None else self._mask(x, real))
        heads = heads.transpose(1, 2).flatten(2)
        if self.gate is not None:
            heads = self.gate(heads, x)
        return self.o_proj(heads)

    def _mask(self, x: Tensor, real: Tensor) -> Tensor:
        """True where a query may attend to a key."""
        check_real(real, x)
        seen = real[:, None, None, :]
        if not self.is_causal:
            return seen
        tokens = x.shape[1]
        return seen & torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).tril()

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None) -> Tensor:
        is_causal = self.is_causal and attn_mask is None
        dropout_p = self.dropout_p if self.training else 0.0
        if self.softmax == "vanilla":
            return F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=attn_mask,
                dropout_p=dropout_p,
                is_causal=is_causal,
                enable_gqa=self.num_kv_heads != self.num_heads,
            )
        sink = q.new_zeros(self.num_heads) if self.sink is None else self.sink.logit
        return sink_attention(
            q, k, v, sink, attn_mask=attn_mask, is_causal=is_causal, dropout_p=dropout_p
        )
