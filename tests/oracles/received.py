"""Received attention, counted one pair of query and key at a time."""

from typing import NamedTuple

import numpy as np

from .arrays import array


class Received(NamedTuple):
    """All [B, H, K]."""

    mass: np.ndarray
    """Sum over counted queries i of A_ij."""
    seen: np.ndarray
    """Number of counted queries that can see j."""
    received: np.ndarray
    """mass / seen; NaN where no counted query sees j."""
    uniform: np.ndarray
    """Under uniform attention: the mean over counted i that see j of 1 / (keys that i sees)."""


def received(weights, visible, counted=None):
    """Received attention of every key; `counted[b, i]` is False where query i is padding."""
    weights, visible = array(weights), array(visible)
    B, H, Q, K = weights.shape
    counted = np.ones((B, Q), dtype=bool) if counted is None else array(counted)
    mass, seen = np.zeros((B, H, K)), np.zeros((B, H, K))
    ratio, uniform = np.full((B, H, K), np.nan), np.full((B, H, K), np.nan)
    for b in range(B):
        for h in range(H):
            keys = [sum(1 for j in range(K) if visible[b, h, i, j]) for i in range(Q)]
            for j in range(K):
                share = 0.0
                for i in range(Q):
                    if not counted[b, i]:
                        continue
                    mass[b, h, j] += weights[b, h, i, j]
                    if visible[b, h, i, j]:
                        seen[b, h, j] += 1
                        share += 1 / keys[i]
                if seen[b, h, j] > 0:
                    ratio[b, h, j] = mass[b, h, j] / seen[b, h, j]
                    uniform[b, h, j] = share / seen[b, h, j]
    return Received(mass, seen, ratio, uniform)
