"""The residual stream before and after a block: closed forms, loops, where it is measured."""

import gc
import math

import numpy as np
import pytest
import timm
import torch
import transformers

import sinkwise as sw
from sinkwise.measure.residual import ResidualCache, residual_statistics
from tests.oracles.arrays import array
from tests.planted import Planted, tokens

BATCH, LENGTH, DIM = 3, 17, 13


def draw(*shape, seed=0, dtype=torch.float32):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)


def padding(side):
    real = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    if side == "left":
        real[1, :5], real[2, :11] = False, False
    if side == "right":
        real[1, 12:], real[2, 3:] = False, False
    if side == "holes":
        real[1, 4:6], real[2, 1:9] = False, False
    return real


def cosine(rows):
    """Mean over pairs i != j, one pair at a time; a zero vector has cosine 0 with all."""
    total = 0.0
    for i in range(len(rows)):
        for j in range(len(rows)):
            lengths = math.sqrt(sum(rows[i] ** 2)) * math.sqrt(sum(rows[j] ** 2))
            if i != j and lengths > 0:
                total += float(rows[i] @ rows[j]) / lengths
    return total / (len(rows) * (len(rows) - 1))


@pytest.mark.parametrize("side", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zero", [False, True])
def test_against_loops(side, dtype, zero):
    x = (3 * draw(BATCH, LENGTH, DIM) + 1).to(dtype)
    if zero:
        x[:, -1 if side == "left" else 0] = 0
    real = padding(side)
    found = residual_statistics(
        x.masked_fill(~real[..., None], torch.nan), None if side == "none" else real
    )
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    for b in range(BATCH):
        rows, places = array(x[b])[array(real[b])], array(real[b]).nonzero()[0]
        norms = np.sqrt((rows**2).sum(1))
        assert found.norm[b][real[b]].numpy() == pytest.approx(norms, rel=tolerance)
        assert found.norm[b][~real[b]].isnan().all()
        # torch's median: of an even number the lower of the middle two
        assert float(found.median[b]) == pytest.approx(
            sorted(norms)[(len(norms) - 1) // 2], rel=tolerance
        )
        assert float(found.similarity[b]) == pytest.approx(cosine(rows), abs=10 * tolerance)
        token, dim = divmod(int(np.abs(rows).argmax()), DIM)
        assert float(found.largest[b]) == pytest.approx(np.abs(rows).max(), rel=tolerance)
        assert (int(found.largest_token[b]), int(found.largest_dim[b])) == (places[token], dim)
    assert found.massive.tolist() == [0] * BATCH
    assert found.norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize(
    ("background", "value", "massive"),
    [
        (0.1, 100.0, 0),  # must be above 100
        (0.1, 100.5, 1),
        (0.1, -100.5, 1),  # a magnitude
        (0.2, 199.0, 0),  # must be 1000 times the median
        (0.2, 200.5, 1),
        (0.0, 101.0, 1),
        (1.0, 999.0, 0),
        (1.0, 1001.0, 1),
    ],
)
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_massive_activations(background, value, massive, side):
    x = torch.full((BATCH, LENGTH, DIM), background)
    x[:, ::2] *= -1
    real = padding(side)
    x[~real] = 1e6  # nobody looks at padding
    token = 14 if side != "right" else 2
    x[2, token, 5] = value
    found = residual_statistics(x, None if side == "none" else real)
    assert found.massive.tolist() == [0, 0, massive]
    assert float(found.largest[2]) == abs(value)
    assert (int(found.largest_token[2]), int(found.largest_dim[2])) == (token, 5)


def test_undefined_is_nan():
    one = residual_statistics(draw(2, 1, DIM), None)
    assert one.similarity.isnan().all() and not one.median.isnan().any()
    real = padding("none")
    real[1] = False
    none = residual_statistics(draw(BATCH, LENGTH, DIM), real)
    assert none.median[1].isnan() and none.similarity[1].isnan()
    assert not none.median[[0, 2]].isnan().any()


def test_equal_and_opposite_tokens():
    x = draw(1, 1, DIM).expand(1, LENGTH, DIM).clone()
    assert float(residual_statistics(x, None).similarity) == pytest.approx(1.0, abs=1e-6)
    x[:, 1::2] *= -1  # 9 against 8: (1 - 17) / (17 * 16)
    assert float(residual_statistics(x, None).similarity) == pytest.approx(-1 / 17, abs=1e-6)


def test_a_state_is_measured_once_and_not_kept_alive():
    cache, x = ResidualCache(), draw(BATCH, LENGTH, DIM)
    first = cache.statistics(x, None)
    assert cache.statistics(x, None) is first
    other = cache.statistics(draw(BATCH, LENGTH, DIM, seed=1), None)
    assert other is not first and cache.statistics(x, None) is first
    x.mul_(2)  # changed in place: it is another state
    assert torch.allclose(cache.statistics(x, None).norm, 2 * first.norm)
    grid = draw(BATCH, 2, 3, DIM)  # [batch height width dim], as Swin has it
    assert cache.statistics(grid, None).norm.shape == (BATCH, 6)
    alive = [ref() is not None for ref, *_ in cache._entries]
    del x, grid
    gc.collect()
    assert any(alive) and not any(ref() is not None for ref, *_ in cache._entries)


CONFIG = {"vocab_size": 97, "hidden_size": 24, "num_hidden_layers": 3, "intermediate_size": 29}


def models():
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4}
    llama = transformers.LlamaConfig(**CONFIG, **heads, num_key_value_heads=2)
    gpt2 = transformers.GPT2Config(vocab_size=97, n_embd=24, n_layer=3, n_head=4)
    bert = transformers.BertConfig(**CONFIG, **heads)
    return {
        "llama": transformers.LlamaModel(llama),
        "gpt2": transformers.GPT2Model(gpt2),
        "bert": transformers.BertModel(bert),
    }


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_the_residual_stream_is_measured_at_the_blocks(name):
    """Before and after block i are hidden_states i and i + 1, never what the final norm made."""
    model = models()[name].eval()
    ids = torch.randint(5, 97, (2, 11), generator=torch.Generator().manual_seed(1))
    found = sw.scan(model, [{"input_ids": ids}]).layers
    last = []
    final = {"llama": "norm", "gpt2": "ln_f", "bert": "pooler"}[name]
    final = model.get_submodule(final)
    handle = final.register_forward_pre_hook(lambda _, x: last.append(x[0]))
    with torch.no_grad():
        states = list(model(ids, output_hidden_states=True).hidden_states)
    handle.remove()
    if name != "bert":  # its last entry is normed; the final norm's own input is not
        states[-1] = last[0]
        assert not torch.allclose(final(last[0]), last[0])
    for i, row in enumerate(found.iter_rows(named=True)):
        norms = states[i + 1].double().norm(dim=-1)
        middle = norms.sort(dim=1).values[:, 5].mean()
        before = states[i].double().norm(dim=-1).sort(dim=1).values[:, 5].mean()
        assert row["token_norm_median"] == pytest.approx(float(middle), rel=1e-5)
        assert row["token_norm_median_before"] == pytest.approx(float(before), rel=1e-5)
        assert row["token_norm_max"] == pytest.approx(float(norms.max()), rel=1e-5)
        if name != "bert":  # all its norms are alike
            assert row["token_norm_max_token"] == int(norms.max(dim=0).values.argmax())
        assert row["token_norm_first"] == pytest.approx(float(norms[:, 0].mean()), rel=1e-5)
        cosines = [np.mean([cosine(array(x)) for x in states[i + j]]) for j in (0, 1)]
        assert row["similarity_before"] == pytest.approx(cosines[0], abs=1e-5)
        assert row["similarity_after"] == pytest.approx(cosines[1], abs=1e-5)
        assert row["largest_activation"] == pytest.approx(
            float(states[i + 1].abs().max()), rel=1e-5
        )
    assert found["normed"].to_list() == [name == "bert"] * 3


def test_a_vision_transformers_blocks_are_not_normed():
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=0)
    found = sw.scan(model, [torch.randn(2, 3, 32, 32)]).layers
    assert found["normed"].to_list() == [False, False]


def test_massive_activations_of_a_scan():
    """One planted coordinate in one of three samples."""
    x = tokens(3, 41, {0: [0]})
    x[..., 20] = 0.05
    x[1, 4, 20] = 1500.0
    layers = sw.scan(Planted([[None]]), [x[:1], x[1:]]).layers.row(0, named=True)
    assert layers["massive_share"] == pytest.approx(1 / 3)
    assert (layers["largest_token"], layers["largest_dim"]) == (4, 20)
    assert layers["largest_activation"] == pytest.approx(1500.0, rel=1e-3)
    assert layers["token_norm_max"] == pytest.approx(1500.0, rel=1e-3)
    assert layers["token_norm_max_token"] == 4
