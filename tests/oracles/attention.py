"""Softmax attention with every option, one score at a time."""

import math

import numpy as np
import torch

from .arrays import array


def visible(mask, B, H, Q, K):
    """bool [B, H, Q, K]: query i of head h in sample b may see key j."""
    result = np.zeros((B, H, Q, K), dtype=bool)
    allowed = additive = None
    if mask.allowed is not None:
        allowed = np.broadcast_to(array(mask.allowed), (B, H, Q, K))
    if mask.additive is not None:
        additive = np.broadcast_to(array(mask.additive), (B, H, Q, K))
        hidden_at = torch.finfo(mask.additive.dtype).min / 2
    for b in range(B):
        for h in range(H):
            for i in range(Q):
                for j in range(K):
                    sees = True
                    position = i + mask.offset
                    if mask.causal and j > position:
                        sees = False
                    # A window of 1 is the query itself, so the oldest key is position - window + 1.
                    if mask.window is not None and j < position - mask.window + 1:
                        sees = False
                    if allowed is not None and not allowed[b, h, i, j]:
                        sees = False
                    if additive is not None and additive[b, h, i, j] <= hidden_at:
                        sees = False
                    result[b, h, i, j] = sees
    return result


def attention(q, k, v, *, scale, softcap, mask, sink_logit):
    """(weights [B, H, Q, K], out [B, H, Q, value_dim], lse [B, H, Q]), all float64.

    A row that sees no key has weights 0 and output 0; its lse is the sink logit, or -inf.
    """
    q, k, v = array(q), array(k), array(v)
    B, H, Q, _ = q.shape
    KV, K = k.shape[1], k.shape[2]
    group = H // KV
    sees = visible(mask, B, H, Q, K)
    additive = np.zeros((B, H, Q, K))
    if mask.additive is not None:
        additive = np.broadcast_to(array(mask.additive), (B, H, Q, K))
    sink = np.full((B, H, Q), -np.inf)
    if sink_logit is not None:
        sink = np.broadcast_to(array(sink_logit), (B, H, Q))

    weights = np.zeros((B, H, Q, K))
    out = np.zeros((B, H, Q, v.shape[3]))
    lse = np.zeros((B, H, Q))
    for b in range(B):
        for h in range(H):
            g = h // group
            for i in range(Q):
                scores = {}
                for j in range(K):
                    if not sees[b, h, i, j]:
                        continue
                    score = float(q[b, h, i] @ k[b, g, j]) * scale
                    if softcap is not None:
                        score = softcap * math.tanh(score / softcap)
                    scores[j] = score + additive[b, h, i, j]
                top = max([*scores.values(), sink[b, h, i]])
                if top == -math.inf:
                    lse[b, h, i] = -math.inf
                    continue
                total = math.exp(sink[b, h, i] - top)
                for score in scores.values():
                    total += math.exp(score - top)
                lse[b, h, i] = top + math.log(total)
                for j, score in scores.items():
                    weights[b, h, i, j] = math.exp(score - top) / total
                    out[b, h, i] += weights[b, h, i, j] * v[b, g, j]
    return weights, out, lse
