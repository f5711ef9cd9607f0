"""The spectral spike of each head's query-key interaction, and that of random weights."""

import torch
from jaxtyping import Float
from torch import Tensor

from sinkwise.attention.spectrum import interaction_spectrum, random_spike, spike_share
from sinkwise.core.records import AttentionSite


def spikes(site: AttentionSite) -> tuple[Float[Tensor, " head"], float] | None:
    """sigma_1 / sum(sigma) of each head's Theta, and of Gaussian weights: 1/head_dim to 1 each.

    High: a single direction of the residual stream decides what the head attends to. None where
    the site's query or key weights are unknown; NaN for a head whose weights are not finite.
    """
    if site.q is None or site.k is None or site.q.shape[1:] != site.k.shape[1:]:
        return None
    q, k, gain = site.q.cpu(), site.k.cpu(), _cpu(site.input_gain)
    readable = _finite(q) & _finite(k).repeat_interleave(q.shape[0] // k.shape[0])
    if gain is not None:
        readable &= torch.isfinite(gain).all()
    values = interaction_spectrum(
        q.nan_to_num(0.0, 0.0, 0.0),
        k.nan_to_num(0.0, 0.0, 0.0),
        None if gain is None else gain.nan_to_num(0.0, 0.0, 0.0),
    )
    share = spike_share(values).masked_fill(~readable, torch.nan)
    return share, random_spike(q.shape[1], q.shape[2])


def _finite(weight: Tensor) -> Tensor:
    return torch.isfinite(weight).all(dim=-1).all(dim=-1)


def _cpu(gain: Tensor | None) -> Tensor | None:
    return None if gain is None else gain.to("cpu", torch.float64)
