"""Ranks from two small Gram matrices against the explicit N x dim update."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sinkwise.attention.rank import output_root, update_spectrum
from tests.oracles import rank as oracle
from tests.oracles.arrays import array
from tests.oracles.cases import close, differs

QUERY, KEY, VALUE_DIM, OUT_DIM, HEAD = 23, 19, 7, 29, 3


def draw(*shape, seed=0, dtype=torch.float64):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)


def problem(event=5, query=QUERY, key=KEY, value_dim=VALUE_DIM, out_dim=OUT_DIM, head=HEAD, seed=0):
    """(weights, v, heads, o, gamma, counted): events that each belong to a head."""
    weights = torch.softmax(2 * draw(event, query, key, seed=seed), -1)
    v = draw(event, key, value_dim, seed=seed + 1)
    o = draw(head, out_dim, value_dim, seed=seed + 2)
    gamma = draw(out_dim, seed=seed + 3)
    counted = draw(event, query, seed=seed + 4) > -0.5
    return weights, v, torch.arange(event) % head, o, gamma, counted


def expected(weights, v, heads, o, gamma, counted):
    """[(energy, top)] of the explicit updates."""
    result = []
    for e in range(len(heads)):
        rows = None if counted is None else counted[e]
        ranks = oracle.ranks(oracle.update(weights[e], v[e], o[heads[e]], gamma, rows))
        result.append((ranks.energy, ranks.top))
    return np.array(result)


def run(weights, v, heads, o, gamma, counted):
    root = output_root(o, gamma)[heads]
    return update_spectrum(weights @ v, root, counted)


def agrees(*parts, relative=1e-10):
    result, right = run(*parts), expected(*parts)
    scale = max(right[:, 0].max(), 1e-300)
    close(array(result.energy) / scale, right[:, 0] / scale, relative)
    close(array(result.top) / scale, right[:, 1] / scale, relative)
    return result


@settings(max_examples=30, deadline=None)
@given(
    event=st.sampled_from((1, 5)),
    query=st.sampled_from((1, 3, 23)),
    value_dim=st.sampled_from((1, 2, 7)),
    out_dim=st.sampled_from((1, 5, 29)),
    scaled=st.booleans(),
    padded=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_sizes(event, query, value_dim, out_dim, scaled, padded, seed):
    weights, v, heads, o, gamma, counted = problem(
        event, query, value_dim=value_dim, out_dim=out_dim, seed=seed
    )
    agrees(weights, v, heads, o, gamma if scaled else None, counted if padded else None)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("out_dim", [3, OUT_DIM])
def test_root_squares_to_the_output_gram(scaled, out_dim):
    o, gamma = draw(HEAD, out_dim, VALUE_DIM), draw(out_dim, seed=1)
    root = array(output_root(o, gamma if scaled else None))
    factor = array(gamma) if scaled else np.ones(out_dim)
    assert root.shape == (HEAD, VALUE_DIM, VALUE_DIM)
    for h in range(HEAD):
        full = factor[:, None] * array(o)[h]
        close(root[h].T @ root[h], full.T @ full, 1e-10)


def test_root_keeps_the_norm_of_every_value():
    """The norm of root v is that of gamma * (W_O v), so ratios can use the root alone."""
    v, o, gamma = draw(KEY, VALUE_DIM), draw(1, OUT_DIM, VALUE_DIM, seed=1), draw(OUT_DIM, seed=2)
    norms = array((v @ output_root(o, gamma)[0].mT).norm(dim=-1))
    close(norms, oracle.value_norms(v, o[0], gamma), 1e-10)
    differs(norms, oracle.value_norms(v), by=0.1)


def test_float32_inputs():
    parts = problem()
    low = [x.float() if torch.is_floating_point(x) else x for x in parts]
    agrees(*low, relative=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_computed_in_float32(dtype):
    _, _, heads, o, gamma, counted = problem()
    out, o, gamma = draw(5, QUERY, VALUE_DIM, dtype=dtype), o.to(dtype), gamma.to(dtype)
    result = update_spectrum(out, output_root(o, gamma)[heads], counted)
    eye = torch.eye(QUERY).expand(5, QUERY, QUERY)
    right = expected(eye, out, heads, o, gamma, counted)
    np.testing.assert_allclose(array(result.energy), right[:, 0], rtol=1e-4)
    np.testing.assert_allclose(array(result.top), right[:, 1], rtol=1e-4)


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_small_layer_scale_keeps_its_ratio(size):
    """LayerScale starts at 1e-4 or less: the energies are tiny and their ratio is not."""
    weights, v, heads, o, gamma, counted = problem()
    parts = [x.float() if torch.is_floating_point(x) else x for x in (weights, v, heads, o)]
    result = run(*parts, (gamma * size).float(), counted)
    right = expected(weights, v, heads, o, gamma, counted)
    np.testing.assert_allclose(
        array(result.energy) / array(result.top), right[:, 0] / right[:, 1], rtol=2e-5
    )


def test_one_source_is_rank_one():
    """All queries attend to one key: all rows of U are equal, stable rank 1."""
    weights = torch.zeros(1, QUERY, KEY, dtype=torch.float64)
    weights[0, :, 4] = torch.linspace(0.1, 1, QUERY, dtype=torch.float64)
    _, v, _, o, gamma, _ = problem(event=1)
    result = run(weights, v, torch.zeros(1, dtype=torch.int64), o, gamma, None)
    norm = oracle.value_norms(v[0], o[0], gamma)[4]
    energy = float((weights**2).sum()) * norm**2
    assert result.energy.item() == pytest.approx(energy, rel=1e-10)
    assert result.top.item() == pytest.approx(energy, rel=1e-10)


@pytest.mark.parametrize("rank", [1, 2, 7])
def test_orthonormal_update_has_its_full_rank(rank):
    out = torch.zeros(1, QUERY, VALUE_DIM, dtype=torch.float64)
    out[0, :rank, :rank] = 3 * torch.eye(rank, dtype=torch.float64)
    o = torch.eye(OUT_DIM, VALUE_DIM, dtype=torch.float64)[None]
    result = update_spectrum(out, output_root(o, None), None)
    assert result.energy.item() == pytest.approx(9 * rank, rel=1e-12)
    assert result.top.item() == pytest.approx(9, rel=1e-12)


def test_known_singular_values():
    """U = X diag(5, 2, 1) Y^T with orthonormal X and Y: energy 30, top 25, stable rank 1.2."""
    x = torch.linalg.qr(draw(QUERY, 3)).Q
    out = (x * torch.tensor([5.0, 2.0, 1.0], dtype=torch.float64))[None]
    o = torch.linalg.qr(draw(OUT_DIM, 3, seed=1)).Q[None]
    result = update_spectrum(out, output_root(o, None), None)
    assert result.energy.item() == pytest.approx(30, rel=1e-12)
    assert result.top.item() == pytest.approx(25, rel=1e-12)


def test_no_update_has_no_energy():
    out = torch.zeros(1, QUERY, VALUE_DIM, dtype=torch.float64)
    result = update_spectrum(out, output_root(draw(1, OUT_DIM, VALUE_DIM), None), None)
    assert result.energy.item() == 0
    assert result.top.item() == 0


def test_padded_rows_do_not_matter():
    out, root = draw(1, QUERY, VALUE_DIM), output_root(draw(1, OUT_DIM, VALUE_DIM, seed=1), None)
    counted = (torch.arange(QUERY) < 11)[None]
    loud = out.masked_fill(~counted[..., None], 1e6)
    whole, short = update_spectrum(loud, root, counted), update_spectrum(out[:, :11], root, None)
    close(whole.energy, short.energy, 1e-9)
    close(whole.top, short.top, 1e-9)


def test_queries_in_any_order():
    weights, v, heads, o, gamma, counted = problem()
    turned = run(weights.flip(1), v, heads, o, gamma, counted.flip(1))
    close(turned.energy, run(weights, v, heads, o, gamma, counted).energy, 1e-9)


def wrong(parts, mistake):
    """(energy, top) with one mistake."""
    weights, v, heads, o, gamma, counted = parts
    if mistake == "no layer scale":
        gamma = None
    elif mistake == "layer scale squared":
        gamma = gamma**2
    elif mistake == "root of layer scale":
        gamma = gamma.abs().sqrt()
    elif mistake == "padding counted":
        counted = None
    elif mistake == "no attention":
        weights = torch.ones_like(weights)
    elif mistake == "first head's projection":
        heads = torch.zeros_like(heads)
    elif mistake == "projection transposed":
        o = o.mT
    elif mistake == "no projection":
        o, gamma = torch.eye(OUT_DIM)[None].expand(HEAD, OUT_DIM, OUT_DIM), None
    elif mistake == "mean over rows taken off":
        weights = weights - weights.mean(1, keepdim=True)
    result = expected(weights, v, heads, o, gamma, counted)
    if mistake == "not squared":
        result = np.sqrt(result)
    return result


@pytest.mark.parametrize("number", ["energy", "top"])
@pytest.mark.parametrize(
    "mistake",
    [
        "no layer scale",
        "layer scale squared",
        "root of layer scale",
        "padding counted",
        "no attention",
        "first head's projection",
        "projection transposed",
        "no projection",
        "mean over rows taken off",
        "not squared",
    ],
)
def test_a_wrong_update_would_show(mistake, number):
    square = mistake in ("projection transposed", "no projection")
    parts = problem(value_dim=OUT_DIM if square else VALUE_DIM)
    result = agrees(*parts)
    column = ("energy", "top").index(number)
    right = array(getattr(result, number))
    differs(np.ones(len(right)), wrong(parts, mistake)[:, column] / right, by=0.05)


class TestOracle:
    """The value ratios, which other tests take from the oracle."""

    v = np.diag([6.0, 2.0, 1.0, 3.0])

    def test_ratio_leaves_the_sink_out_of_the_mean(self):
        norms = oracle.value_norms(self.v)
        assert oracle.value_ratio(norms, 0) == pytest.approx(6 / 2)
        assert oracle.value_ratio(norms, 0) != pytest.approx(norms[0] / norms.mean())

    def test_ratio_leaves_padding_out_of_the_mean(self):
        norms = oracle.value_norms(self.v)
        counted = [True, True, False, True]
        assert oracle.value_ratio(norms, 0, counted) == pytest.approx(6 / 2.5)

    def test_projected_ratio_uses_the_layer_scale(self):
        w_o, gamma = np.eye(4), np.array([0.5, 1.0, 1.0, 1.0])
        scaled = oracle.value_norms(self.v, w_o, gamma)
        assert oracle.value_ratio(scaled, 0) == pytest.approx(3 / 2)

    def test_update_is_weights_times_projected_values(self):
        weights, v, _, o, gamma, counted = problem()
        u = oracle.update(weights[0], v[0], o[0], gamma, counted[0])
        whole = array(weights[0]) @ array(v[0]) @ array(o[0]).T * array(gamma)
        np.testing.assert_allclose(u, whole[array(counted[0])], atol=1e-12)
        assert oracle.ranks(u).update_norm == pytest.approx(np.sqrt((u**2).sum(1).mean()))
        assert oracle.ranks(u).rank_one_energy == pytest.approx(1 / oracle.ranks(u).stable_rank)
