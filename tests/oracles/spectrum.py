"""Singular values of the query-key interaction, from the explicit dim x dim product."""

import numpy as np
import scipy.linalg

from .arrays import array


def interaction(q, k, gain=None):
    """Theta [head, dim, dim] with x Theta y^T = (x q_h^T)(y k_h^T)^T, x and y times the gain."""
    q, k = array(q), array(k)
    dim = q.shape[2]
    gain = np.ones(dim) if gain is None else array(gain)
    group = q.shape[0] // k.shape[0]
    return np.stack([(q[h] * gain).T @ (k[h // group] * gain) for h in range(q.shape[0])])


def spectrum(q, k, gain=None):
    """The head_dim largest singular values of each Theta, [head, head_dim], descending."""
    head_dim = array(q).shape[1]
    return np.stack([scipy.linalg.svdvals(t)[:head_dim] for t in interaction(q, k, gain)])


def spike_share(sigma):
    """The largest singular value's share of the sum of all."""
    return float(np.max(sigma) / np.sum(sigma))
