"""Random attention calls for the tests: every kind of mask, padding, grouping and option."""

from dataclasses import dataclass
from functools import cached_property

import hypothesis.strategies as st
import numpy as np
import torch

from sinkwise.core.records import OPEN, AttentionMask

from .arrays import array
from .attention import attention, visible
from .received import received

PADDINGS = ("none", "left", "right")
ALLOWED = ("none", "query", "head", "blank")
ADDITIVES = ("none", "alibi", "inf", "lowest")
SINKS = (None, -1e4, float("-inf"), 0.0, 100.0, "per head")


@dataclass(frozen=True, eq=False)
class Case:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    softcap: float | None = None
    mask: AttentionMask = OPEN
    sink_logit: torch.Tensor | None = None
    counted: torch.Tensor | None = None

    @property
    def sizes(self):
        """(batch, head, query, key)."""
        return (*self.q.shape[:3], self.k.shape[2])

    @cached_property
    def visible(self):
        return visible(self.mask, *self.sizes)

    @cached_property
    def expected(self):
        """The oracle's (weights, out, lse)."""
        return attention(
            self.q,
            self.k,
            self.v,
            scale=self.scale,
            softcap=self.softcap,
            mask=self.mask,
            sink_logit=self.sink_logit,
        )

    @cached_property
    def received(self):
        return received(self.expected[0], self.visible, self.counted)

    @cached_property
    def tolerance(self):
        """Largest error allowed on a weight, or on a mean of weights.

        float64 leaves rounding only. In float32 each score carries at most (head_dim + 3) roundings
        of S = scale * sum_d |q_d k_d|, the softmax doubles that and sums K terms; never above 2e-5.
        """
        if self.q.dtype == torch.float64:
            return 1e-10
        group = self.q.shape[1] // self.k.shape[1]
        q, k = np.abs(array(self.q)), np.abs(array(self.k)).repeat(group, axis=1)
        largest = abs(self.scale) * float((q @ k.swapaxes(2, 3)).max())
        if self.mask.additive is not None:
            additive = np.broadcast_to(array(self.mask.additive), self.sizes)
            largest += float(np.abs(np.where(self.visible, additive, 0)).max())
        relative = (2 * (self.q.shape[3] + 3) * largest + self.sizes[3]) * 2.0**-24
        return min(2e-5, relative)

    @property
    def options(self):
        return {"scale": self.scale, "softcap": self.softcap, "mask": self.mask}


def make(
    *,
    batch=2,
    kv_head=3,
    group=1,
    query=17,
    key=None,
    head_dim=7,
    value_dim=5,
    dtype=torch.float64,
    causal=False,
    offset=0,
    window=None,
    padding="none",
    allowed="none",
    additive="none",
    softcap=None,
    sink=None,
    seed=0,
):
    """A case of these sizes; `key` defaults to query + offset. `sink` is a number or "per head"."""
    random = torch.Generator().manual_seed(seed)
    key = query + offset if key is None else key
    head = kv_head * group

    def normal(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    def chance(*shape, share):
        return torch.rand(*shape, generator=random) < share

    q, k = 1.3 * normal(batch, head, query, head_dim), normal(batch, kv_head, key, head_dim)
    # One key that every query of a head likes and one direction they share: a sink, as in practice.
    k[:, :, min(1, key - 1)] += 1.0
    q += 0.4
    v = normal(batch, kv_head, key, value_dim)

    seen = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    counted = None
    if padding != "none":
        real = torch.ones(batch, key, dtype=torch.bool)
        for b in range(batch):
            gone = min(2 * b + 1, key - 1)
            real[b, :gone] = padding == "right"
            real[b, key - gone :] = padding == "left"
        seen = seen & real[:, None, None, :]
        position = (torch.arange(query) + offset).clamp(max=key - 1)
        counted = real[:, position]
    if allowed == "query":
        seen = seen & chance(batch, 1, query, key, share=0.7)
    elif allowed == "head":
        seen = seen & chance(batch, head, query, key, share=0.7)
    elif allowed == "blank":
        rows = torch.arange(query)
        seen = seen & (rows % 3 != 1)[None, None, :, None].expand(1, 1, query, key)

    bias = None
    if additive == "alibi":
        slope = 2.0 ** -torch.arange(1, head + 1, dtype=torch.float64)
        distance = (torch.arange(query)[:, None] + offset - torch.arange(key)[None]).abs()
        bias = -slope[None, :, None, None] * distance[None, None]
    elif additive == "inf":
        bias = normal(1, 1, query, key).masked_fill(
            chance(1, 1, query, key, share=0.3), float("-inf")
        )
    elif additive == "lowest":
        bias = normal(batch, 1, 1, key).masked_fill(
            chance(batch, 1, 1, key, share=0.3), torch.finfo(dtype).min
        )

    sink_logit = None
    if sink == "per head":
        sink_logit = normal(1, head, 1).to(dtype)
    elif sink is not None:
        sink_logit = torch.full((1, head, 1), sink, dtype=dtype)

    return Case(
        q=q.to(dtype),
        k=k.to(dtype),
        v=v.to(dtype),
        scale=0.61,
        softcap=softcap,
        mask=AttentionMask(
            causal=causal,
            offset=offset if causal else 0,
            window=window,
            allowed=None if seen.numel() == 1 else seen,
            additive=None if bias is None else bias.to(dtype),
        ),
        sink_logit=sink_logit,
        counted=counted,
    )


@st.composite
def cases(draw, softcap=True, dtypes=(torch.float64, torch.float32)):
    """Any combination of the options, at small sizes."""
    causal = draw(st.booleans())
    return make(
        batch=draw(st.sampled_from((1, 2))),
        kv_head=draw(st.sampled_from((1, 3))),
        group=draw(st.sampled_from((1, 2))),
        query=draw(st.sampled_from((1, 5, 13))),
        key=draw(st.sampled_from((None, 1, 11, 17))),
        head_dim=draw(st.sampled_from((1, 7, 8))),
        value_dim=draw(st.sampled_from((1, 5))),
        dtype=draw(st.sampled_from(dtypes)),
        causal=causal,
        offset=draw(st.sampled_from((0, 2, 19))) if causal else 0,
        window=draw(st.sampled_from((None, 1, 3))) if causal else None,
        padding=draw(st.sampled_from(PADDINGS)),
        allowed=draw(st.sampled_from(ALLOWED)),
        additive=draw(st.sampled_from(ADDITIVES)),
        softcap=draw(st.sampled_from((None, 1.9))) if softcap else None,
        sink=draw(st.sampled_from(SINKS)),
        seed=draw(st.integers(0, 99)),
    )


def close(actual, expected, tolerance, relative=1e-6):
    """Assert closeness to `tolerance`; NaN and infinities must be in the same places.

    float64 results are held to `tolerance` alone; lower precision also to `relative`.
    """
    double = getattr(actual, "dtype", torch.float64) == torch.float64
    np.testing.assert_allclose(
        array(actual), array(expected), atol=tolerance, rtol=1e-10 if double else relative
    )


def differs(actual, wrong, by):
    """Assert that a wrong formula would have been noticed: some entry is off by more than `by`."""
    gap = np.abs(np.nan_to_num(array(actual)) - np.nan_to_num(array(wrong)))
    assert gap.max() > by, f"the inputs do not tell this mistake apart (largest gap {gap.max():g})"
