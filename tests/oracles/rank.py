"""A head's update as the explicit matrix, its ranks, and the value ratios of its sink."""

import math
from typing import NamedTuple

import numpy as np
import scipy.linalg

from .arrays import array


class Ranks(NamedTuple):
    energy: float
    """Squared Frobenius norm of U."""
    top: float
    """Squared largest singular value of U."""
    stable_rank: float
    rank_one_energy: float
    update_norm: float
    """Root of the mean over rows of their squared norm."""


def projected(v, w_o, layer_scale=None):
    """u_j = layer_scale * (w_o v_j), [rows, out_dim]; w_o is [out_dim, value_dim]."""
    v, w_o = array(v), array(w_o)
    gamma = np.ones(w_o.shape[0]) if layer_scale is None else array(layer_scale)
    u = np.zeros((v.shape[0], w_o.shape[0]))
    for j in range(v.shape[0]):
        for d in range(w_o.shape[0]):
            u[j, d] = gamma[d] * sum(w_o[d, e] * v[j, e] for e in range(v.shape[1]))
    return u


def update(weights, v, w_o, layer_scale=None, counted=None):
    """U = A u for the counted queries, [rows, out_dim]; weights [Q, K] and v [K, value_dim]."""
    weights, u = array(weights), projected(v, w_o, layer_scale)
    counted = np.ones(weights.shape[0], dtype=bool) if counted is None else array(counted)
    rows = []
    for i in range(weights.shape[0]):
        if counted[i]:
            rows.append(sum(weights[i, j] * u[j] for j in range(u.shape[0])))
    return np.array(rows).reshape(len(rows), u.shape[1])


def ranks(u):
    """Stable rank, rank-one energy and rms norm of the update matrix, from its singular values."""
    u = array(u)
    if u.shape[0] == 0:
        return Ranks(0.0, 0.0, math.nan, math.nan, math.nan)
    sigma = scipy.linalg.svdvals(u)
    energy, top = float(np.sum(u**2)), float(sigma[0] ** 2)
    if energy == 0:
        return Ranks(0.0, 0.0, math.nan, math.nan, 0.0)
    return Ranks(
        energy=energy,
        top=top,
        stable_rank=energy / top,
        rank_one_energy=top / float(np.sum(sigma**2)),
        update_norm=math.sqrt(energy / u.shape[0]),
    )


def value_norms(v, w_o=None, layer_scale=None):
    """Norm of u_j for every key j; of v_j itself when no output projection is given."""
    u = array(v) if w_o is None else projected(v, w_o, layer_scale)
    return np.array([math.sqrt(sum(x * x for x in row)) for row in u])


def value_ratio(norms, s, counted=None):
    """norms[s] over the mean norm of the other counted keys; NaN where there is none."""
    others = [
        norms[j] for j in range(len(norms)) if j != s and (counted is None or bool(counted[j]))
    ]
    if not others or sum(others) == 0:
        return math.nan
    return norms[s] / (sum(others) / len(others))
