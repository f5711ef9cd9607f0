"""The query-key spectrum against the explicit dim x dim product and planted spectra."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkwise.attention.spectrum import interaction_spectrum, random_spike
from tests.oracles import spectrum as oracle
from tests.oracles.arrays import array
from tests.oracles.cases import close, differs


def draw(*shape, seed=0, dtype=torch.float64):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)


def orthonormal(rows, columns, seed):
    return torch.linalg.qr(draw(rows, columns, seed=seed)).Q


def planted(sigma, dim=31, seed=0, mixed=True):
    """(q, k), each [1, len(sigma), dim], whose Theta has exactly these singular values."""
    sigma = torch.tensor(sigma, dtype=torch.float64)
    head_dim = len(sigma)
    mix = orthonormal(head_dim, head_dim, seed) if mixed else torch.eye(head_dim).double()
    left, right = orthonormal(dim, head_dim, seed + 1), orthonormal(dim, head_dim, seed + 2)
    q = mix @ (sigma.sqrt()[:, None] * left.T)
    k = mix @ (sigma.sqrt()[:, None] * right.T)
    return q[None], k[None]


@settings(max_examples=30, deadline=None)
@given(
    kv_head=st.sampled_from((1, 3)),
    group=st.sampled_from((1, 2)),
    head_dim=st.sampled_from((1, 2, 7)),
    dim=st.sampled_from((7, 11, 29)),
    gained=st.booleans(),
    dtype=st.sampled_from((torch.float64, torch.float32, torch.bfloat16)),
    seed=st.integers(0, 99),
)
def test_any_sizes(kv_head, group, head_dim, dim, gained, dtype, seed):
    q = draw(kv_head * group, head_dim, dim, seed=seed, dtype=dtype)
    k = draw(kv_head, head_dim, dim, seed=seed + 1, dtype=dtype)
    gain = draw(dim, seed=seed + 2, dtype=dtype) if gained else None
    sigma = interaction_spectrum(q, k, gain)
    assert sigma.dtype == torch.float64
    assert sigma.shape == (kv_head * group, head_dim)
    assert (sigma.diff(dim=-1) <= 0).all()
    close(sigma, oracle.spectrum(q, k, gain), 1e-10 * dim)


def test_head_wider_than_the_model():
    """Theta is dim x dim, so the values past dim are zero."""
    q, k = draw(2, 7, 5), draw(2, 7, 5, seed=1)
    right = np.pad(oracle.spectrum(q, k), ((0, 0), (0, 2)))
    close(interaction_spectrum(q, k), right, 1e-10)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_nine_decades(mixed, seed):
    sigma = 10.0 ** -np.arange(10)
    q, k = planted(sigma, seed=seed, mixed=mixed)
    np.testing.assert_allclose(array(interaction_spectrum(q, k))[0], sigma, rtol=1e-6)


@pytest.mark.parametrize("spike", [1.0, 4.0, 100.0])
def test_planted_spike_has_its_share(spike):
    q, k = planted([spike, *[1.0] * 6])
    share = oracle.spike_share(array(interaction_spectrum(q, k)))
    assert share == pytest.approx(spike / (spike + 6), rel=1e-10)


def test_rank_one_interaction_is_all_spike():
    """Every row of q is a multiple of one vector and so is every row of k."""
    a, b = draw(7, 1), draw(7, 1, seed=1)
    x, y = draw(1, 31, seed=2), draw(1, 31, seed=3)
    sigma = interaction_spectrum((a @ x)[None], (b @ y)[None])
    expected = abs(float((a * b).sum())) * float(x.norm() * y.norm())
    assert sigma[0, 0].item() == pytest.approx(expected, rel=1e-10)
    assert sigma[0, 1:].max().item() < 1e-12 * expected


def test_gain_of_one_is_no_gain():
    q, k = draw(2, 7, 31), draw(2, 7, 31, seed=1)
    ones = torch.ones(31, dtype=torch.float64)
    close(interaction_spectrum(q, k, ones), interaction_spectrum(q, k), 1e-11)


def test_torch_stores_weights_transposed():
    """Theta = W_Q W_K^T of the row convention is `Wq.weight.T @ Wk.weight`; square, so both fit."""
    dim = 13
    torch.manual_seed(0)
    wq, wk = (torch.nn.Linear(dim, dim, bias=False, dtype=torch.float64) for _ in range(2))
    sigma = interaction_spectrum(wq.weight.detach()[None], wk.weight.detach()[None])[0]
    right = torch.linalg.svdvals(wq.weight.detach().T @ wk.weight.detach())
    trap = torch.linalg.svdvals(wq.weight.detach() @ wk.weight.detach().T)
    close(sigma, right, 1e-12)
    differs(sigma, trap, by=0.05)
    # Theta is what the scores are made of.
    x, y = draw(5, dim), draw(3, dim, seed=1)
    theta = oracle.interaction(wq.weight[None], wk.weight[None])[0]
    close(wq(x).detach() @ wk(y).detach().T, array(x) @ theta @ array(y).T, 1e-10)


def wrong(q, k, gain, mistake):
    group = q.shape[0] // k.shape[0]
    q, k, gain = array(q), array(k), array(gain)
    each = k.repeat(group, axis=0)
    if mistake == "gain on the queries only":
        return oracle.spectrum(q * gain, k)
    if mistake == "no gain":
        return oracle.spectrum(q, k)
    if mistake == "gain squared":
        return oracle.spectrum(q, k, gain**2)
    if mistake == "heads interleaved":
        return oracle.spectrum(q, k[np.arange(q.shape[0]) % k.shape[0]], gain)
    if mistake == "transposed":
        return np.linalg.svd((q * gain) @ (each * gain).swapaxes(1, 2), compute_uv=False)
    if mistake == "product of the factors' own values":
        own = np.linalg.svd(q * gain, compute_uv=False)
        return own * np.linalg.svd(each * gain, compute_uv=False)
    if mistake == "squared":
        return oracle.spectrum(q, k, gain) ** 2
    raise AssertionError(mistake)


@pytest.mark.parametrize(
    "mistake",
    [
        "gain on the queries only",
        "no gain",
        "gain squared",
        "heads interleaved",
        "transposed",
        "product of the factors' own values",
        "squared",
    ],
)
def test_a_wrong_spectrum_would_show(mistake):
    q, k, gain = draw(6, 7, 31), draw(3, 7, 31, seed=1), draw(31, seed=2)
    sigma = interaction_spectrum(q, k, gain)
    close(sigma, oracle.spectrum(q, k, gain), 1e-9)
    differs(sigma, wrong(q, k, gain, mistake), by=0.1)


def shares(head_dim, dim, draws, of=lambda sigma: sigma):
    """Spike shares of independent Gaussian factors."""
    random = np.random.default_rng(0)
    q, k = random.normal(size=(2, draws, head_dim, dim))
    return np.array([np.max(of(s)) / np.sum(of(s)) for s in oracle.spectrum(q, k)])


@pytest.mark.parametrize(("head_dim", "dim"), [(2, 7), (7, 31), (16, 64), (13, 13)])
def test_random_spike_is_the_mean_share(head_dim, dim):
    many = shares(head_dim, dim, draws=100)
    error = many.std() * np.sqrt(1 / 64 + 1 / 100)
    spike = random_spike(head_dim, dim, draws=64)
    assert abs(spike - many.mean()) < 4 * error
    assert 1 / head_dim < spike < 1


def test_random_spike_of_squares_or_of_one_factor_would_show():
    spike = random_spike(7, 31, draws=64)
    assert abs(spike - shares(7, 31, 100, of=np.square).mean()) > 0.05
    single = np.random.default_rng(0).normal(size=(100, 7, 31))
    sigma = np.linalg.svd(single, compute_uv=False)
    assert abs(spike - (sigma[:, 0] / sigma.sum(1)).mean()) > 0.02


def test_random_spike_of_one_direction_is_one():
    assert random_spike(1, 31) == pytest.approx(1, abs=1e-12)


def test_random_spike_follows_its_seed_and_no_other():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = random_spike(7, 31, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert random_spike(7, 31, seed=3) == first
    assert random_spike(7, 31, seed=4) != first
