"""The spectral spike of each head's query-key interaction, beside what chance would give."""

import torch
from jaxtyping import Float
from torch import Tensor

from sinkwise.attention.spectrum import interaction_spectrum, random_spike, spike_share
from sinkwise.records import AttentionSite


def spikes(site: AttentionSite) -> tuple[Float[Tensor, " head"], float] | None:
    """(sigma_1 / sum(sigma) of each head's Theta, the same for Gaussian weights), 1/head_dim to 1.

    High: one direction of the residual stream decides where the head looks. None where the site
    does not know its query and key weights.
    """
    if site.q is None or site.k is None or site.q.shape[1:] != site.k.shape[1:]:
        return None
    values = interaction_spectrum(site.q.cpu(), site.k.cpu(), _cpu(site.input_gain))
    return spike_share(values), random_spike(site.q.shape[1], site.q.shape[2])


def _cpu(gain: Tensor | None) -> Tensor | None:
    return None if gain is None else gain.to("cpu", torch.float64)
