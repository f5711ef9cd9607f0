"""Spikes of a site's heads, against the explicit dim x dim interaction."""

from dataclasses import replace

import pytest
import torch

from sinkwise.core.records import AttentionSite
from sinkwise.measure.spike import spikes
from tests.oracles import spectrum

HEADS, WIDTH, DIM = 6, 5, 23


def site(kv_heads=3, seed=0, gain=False, **fields):
    random = torch.Generator().manual_seed(seed)
    q = torch.randn(HEADS, WIDTH, DIM, generator=random)
    k = torch.randn(kv_heads, WIDTH, DIM, generator=random)
    gains = 3 * torch.rand(DIM, generator=random) if gain else None
    return AttentionSite(name="attn", q=q, k=k, v=None, o=None, input_gain=gains, **fields)


@pytest.mark.parametrize("kv_heads", [6, 3, 1])
@pytest.mark.parametrize("gain", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_the_whole_matrix(kv_heads, gain, dtype):
    weights = site(kv_heads, gain=gain)
    weights = replace(weights, q=weights.q.to(dtype), k=weights.k.to(dtype))
    found, chance = spikes(weights)
    sigma = spectrum.spectrum(weights.q, weights.k, weights.input_gain)
    assert found.tolist() == pytest.approx([spectrum.spike_share(s) for s in sigma], rel=1e-9)
    assert 1 / WIDTH < chance < 0.5
    # Random weights look like chance; 8 draws leave a few hundredths.
    if not gain:
        assert float(found.mean()) == pytest.approx(chance, abs=0.1)


def test_a_planted_spike_is_found_in_torchs_layout():
    """Theta of rank one, large and small beside noise, by W.T @ W as torch stores weights."""
    weights = site(6)
    weights.q[2], weights.k[2] = 0, 0
    weights.q[2, 0], weights.k[2, 0] = torch.randn(DIM), torch.randn(DIM)
    weights.q[4, 1] *= 100
    weights.k[4, 1] *= 100
    found, chance = spikes(weights)
    assert float(found[2]) == pytest.approx(1.0)
    assert float(found[4]) > 0.99
    assert all(float(found[h]) < 2 * chance for h in (0, 1, 3, 5))


def test_flat_and_zero():
    weights = site(6)
    eye = torch.eye(DIM)[:WIDTH]
    weights.q[:], weights.k[:] = eye, eye
    weights.q[1] = 0
    found, _ = spikes(weights)
    assert found[0] == pytest.approx(1 / WIDTH) and found[1].isnan()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_weights_that_are_not_finite(bad):
    """The head that holds them has no spike; a key head shared by two has none for both."""
    whole = spikes(site(3))[0]
    weights = site(3)
    weights.q[0, 2, 3] = bad
    weights.k[2, 0, 0] = bad
    found, _ = spikes(weights)
    assert found.isnan().tolist() == [True, False, False, False, True, True]
    assert torch.equal(found[1:4], whole[1:4])
    weights = site(3, gain=True)
    weights.input_gain[1] = bad
    assert spikes(weights)[0].isnan().all()


def test_unknown_weights():
    assert spikes(replace(site(), q=None)) is None
    assert spikes(replace(site(), k=None)) is None
