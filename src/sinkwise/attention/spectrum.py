"""The spectrum of a head's query-key interaction, and that of random weights."""

from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor


def interaction_spectrum(
    q: Float[Tensor, "head head_dim dim"],
    k: Float[Tensor, "kv_head head_dim dim"],
    gain: Float[Tensor, " dim"] | None = None,
) -> Float[Tensor, "head head_dim"]:
    """Singular values of Theta = diag(gain) W_Q W_K^T diag(gain), per head, in descending order.

    torch stores W transposed, so Theta is q[h].T @ k[h]. With q.T = Q_q R_q and k.T = Q_k R_k they
    equal those of the small matrix R_q R_k^T, accurate over nine decades in float64. A dominant
    first singular value lets one direction of the residual stream decide what the head attends to.
    With rotary positions this is the interaction at distance 0.
    """
    left, right = q.detach().to(torch.float64), k.detach().to(torch.float64)
    if gain is not None:
        left, right = (
            left * gain.detach().to(torch.float64),
            right * gain.detach().to(torch.float64),
        )
    r_q = torch.linalg.qr(left.mT, mode="r").R
    r_k = torch.linalg.qr(right.mT, mode="r").R
    r_k = r_k.repeat_interleave(q.shape[0] // k.shape[0], dim=0)
    values = torch.linalg.svdvals(r_q @ r_k.mT)
    return torch.nn.functional.pad(values, (0, q.shape[1] - values.shape[1]))


def spike_share(values: Float[Tensor, "head head_dim"]) -> Float[Tensor, " head"]:
    """sigma_1 / sum(sigma), 1/head_dim (flat) to 1 (rank one); NaN if all are 0."""
    return values[:, 0] / values.sum(dim=-1)


@lru_cache(maxsize=256)
def random_spike(head_dim: int, dim: int, draws: int = 8, seed: int = 0) -> float:
    """Mean spike share of Gaussian W_Q and W_K of the same shape, as if there was no training.

    The share does not depend on the scale of the entries.
    """
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, draws, head_dim, dim, generator=generator, dtype=torch.float64)
    return float(spike_share(interaction_spectrum(q, k)).mean())
