"""Transformers with sinks set by hand: all weights are known, and so is every statistic.

The residual stream of a token is [1 | markers | payload | scratch]. A head attends to one marker:
its query depends on the constant 1, its keys on the markers, so a marked token scores `gain` with
every query and any other token 0. Values are the payload; updates go to the scratch, which no
head uses: every layer gets the same markers and payloads.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from sinkwise.core.layout import KINDS, TokenLayout

MARKERS, PAYLOAD, SCRATCH = 5, 7, 10
DIM = 1 + MARKERS + PAYLOAD + SCRATCH
GAIN = 12.0


class PlantedAttention(nn.Module):
    """`targets[h]` is the marker that head h attends to, or None for uniform attention."""

    names = ("q_proj", "k_proj", "v_proj", "o_proj")

    def __init__(self, targets, *, kv_heads=None, causal=True, gain=GAIN, eager=False, seed=0):
        super().__init__()
        heads = len(targets)
        self.num_heads, self.num_kv_heads = heads, kv_heads or heads
        self.head_dim, self.value_dim = MARKERS, PAYLOAD
        self.causal, self.eager, self.scale = causal, eager, 0.5
        random = torch.Generator().manual_seed(seed)
        q = torch.zeros(heads, MARKERS, DIM)
        for head, marker in enumerate(targets):
            if marker is not None:
                q[head, marker, 0] = gain / self.scale
        k = torch.zeros(self.num_kv_heads, MARKERS, DIM)
        k[:, :, 1 : 1 + MARKERS] = torch.eye(MARKERS)
        v = torch.zeros(self.num_kv_heads, PAYLOAD, DIM)
        payload = slice(1 + MARKERS, 1 + MARKERS + PAYLOAD)
        turns = torch.randn(self.num_kv_heads, PAYLOAD, PAYLOAD, generator=random)
        v[:, :, payload] = torch.linalg.qr(turns).Q
        # Singular values 0.8 to 1.2: a projected norm differs from the raw one, but not by much.
        turns = torch.linalg.qr(torch.randn(heads, SCRATCH, PAYLOAD, generator=random)).Q
        o = torch.zeros(DIM, heads * PAYLOAD)
        o[-SCRATCH:] = (turns * torch.linspace(0.8, 1.2, PAYLOAD)).transpose(0, 1).flatten(1)
        for name, weight in zip(self.names, (q, k, v, o), strict=True):
            linear = nn.Linear(weight.shape[-1], weight.numel() // weight.shape[-1], bias=False)
            linear.weight.data.copy_(weight.reshape(linear.weight.shape))
            self.add_module(name, linear)

    def forward(self, x):
        q, k, v, o = (getattr(self, name) for name in self.names)
        batch, length, _ = x.shape
        q = q(x).view(batch, length, self.num_heads, -1).transpose(1, 2)
        k = k(x).view(batch, length, self.num_kv_heads, -1).transpose(1, 2)
        v = v(x).view(batch, length, self.num_kv_heads, -1).transpose(1, 2)
        group = self.num_heads // self.num_kv_heads
        if self.eager:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            scores = q @ k.transpose(-1, -2) * self.scale
            if self.causal:
                hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
                scores = scores.masked_fill(hidden, -torch.inf)
            y = scores.softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(
                q, k, v, is_causal=self.causal, scale=self.scale, enable_gqa=group > 1
            )
        return o(y.transpose(1, 2).reshape(batch, length, -1))


class OddAttention(PlantedAttention):
    """The same with parameter names that no layout knows."""

    names = ("alpha", "beta", "delta", "omega")


class SquashedAttention(OddAttention):
    """Its output is not linear in the heads: W_O cannot be known."""

    def forward(self, x):
        return torch.tanh(super().forward(x))


class PlantedBlock(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attn = attention

    def forward(self, x):
        return x + self.attn(x)


class Planted(nn.Module):
    """One block for each list of targets in `layers`; takes [batch token DIM]."""

    def __init__(self, layers, kind=PlantedAttention, **options):
        super().__init__()
        attentions = [kind(t, **options, seed=17 + i) for i, t in enumerate(layers)]
        self.layers = nn.ModuleList([PlantedBlock(a) for a in attentions])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def tokens(batch, length, marks, *, empty=(), seed=0):
    """x [batch length DIM] with random payloads of norm 1 to 1.3; `marks` maps a marker to tokens.

    The tokens in `empty` carry no payload: (token) in every sample, (sample, token) in one.
    """
    random = torch.Generator().manual_seed(seed)
    x = torch.zeros(batch, length, DIM)
    x[..., 0] = 1
    payload = torch.randn(batch, length, PAYLOAD, generator=random)
    size = 1 + 0.3 * torch.rand(batch, length, 1, generator=random)
    x[..., 1 + MARKERS : 1 + MARKERS + PAYLOAD] = F.normalize(payload, dim=-1) * size
    for marker, places in marks.items():
        for place in places:
            x[:, place, 1 + marker] = 1
    for place in empty:
        rows = (slice(None), place) if isinstance(place, int) else place
        x[*rows, 1 + MARKERS : 1 + MARKERS + PAYLOAD] = 0
    return x


def kinds(*first, rest="patch"):
    """A `layout=` for scan: the kinds of the first tokens, `rest` for the others."""

    def layout(batch):
        row = [KINDS.index(kind) for kind in first]
        row += [KINDS.index(rest)] * (batch.shape[1] - len(row))
        return TokenLayout(torch.tensor(row).expand(batch.shape[0], -1))

    return layout


@dataclass(frozen=True)
class Expected:
    """Closed forms for the sink at `token` of a head whose marked tokens are `sinks`."""

    received: float
    excess: float
    routed_share: float
    min_attention: float


def expected(length, sinks, token, *, causal, gain=GAIN):
    """Query i sees n keys, m of them sinks: each sink gets e^gain / (m e^gain + n - m)."""
    weights, uniform = [], []
    for query in range(length):
        visible = query + 1 if causal else length
        if token >= visible:
            continue
        marked = sum(1 for sink in sinks if sink < visible)
        weights.append(1 / (marked + (visible - marked) * math.exp(-gain)))
        uniform.append(1 / visible)
    return Expected(
        received=float(np.mean(weights)),
        excess=float(np.mean(weights) - np.mean(uniform)),
        routed_share=float(np.mean([w >= 0.5 for w in weights])),
        min_attention=min(weights),
    )


def value_ratios(model, x, layer, head, token):
    """(projected, raw) of each sample, in float64 from the planted weights."""
    attention = model.layers[layer].attn
    kv = head // (attention.num_heads // attention.num_kv_heads)
    v, o = (getattr(attention, attention.names[i]).weight.detach().double() for i in (2, 3))
    value = x.double() @ v[kv * PAYLOAD : (kv + 1) * PAYLOAD].T
    update = value @ o[:, head * PAYLOAD : (head + 1) * PAYLOAD].T
    ratios = []
    for vectors in (update, value):
        norms = vectors.square().sum(-1).sqrt()
        others = (norms.sum(1) - norms[:, token]) / (norms.shape[1] - 1)
        ratios.append((norms[:, token] / others).numpy())
    return ratios
