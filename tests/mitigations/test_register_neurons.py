"""Test-time registers, on vision transformers in which a neuron that makes outliers is planted."""

import copy

import pytest
import torch
from torch import nn

import sinkwise as sw
from sinkwise.conformance.traces import state_of
from sinkwise.core.layout import KINDS
from sinkwise.errors import InputError
from sinkwise.hosts.blocks import find_blocks
from sinkwise.hosts.layouts import token_layout
from sinkwise.mitigations.applying import mitigate, mitigated
from sinkwise.mitigations.neuron_search import _Search, find_register_neurons
from sinkwise.mitigations.register_neurons import (
    RegisterNeurons,
    down_projections,
    move_to_first_token,
    write_directions,
)
from sinkwise.mitigations.registers import Registers
from tests.models import build, ids
from tests.models.case import GRID, IMAGE, PATCH

NEURON = 17


def open_clip_tower():
    transformer = pytest.importorskip("open_clip.transformer")
    torch.manual_seed(0)
    return transformer.VisionTransformer(
        image_size=24, patch_size=8, width=40, layers=3, heads=5, mlp_ratio=2.0, output_dim=7
    ).eval()


def dinov2_with_gate():
    """DINOv2-g's gated MLP."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Dinov2Config(
        hidden_size=40, num_hidden_layers=3, num_attention_heads=5, image_size=24, patch_size=8,
        use_swiglu_ffn=True, layerscale_value=0.5,
    )  # fmt: skip
    return transformers.Dinov2Model(config).eval()


MODELS = {
    "timm": lambda: build("timm-vit-sdpa")[0],
    "timm with registers and LayerScale": lambda: build("timm-vit-registers-sdpa")[0],
    "transformers ViT": lambda: build("vit-sdpa")[0],
    "DINOv2": lambda: build("dinov2-sdpa")[0],
    "DINOv2 with registers": lambda: build("dinov2-registers-sdpa")[0],
    "DINOv2 gated": dinov2_with_gate,
    "CLIP vision": lambda: build("clip-vision-sdpa")[0],
    "open_clip": open_clip_tower,
}
WIDE = ("timm", "timm with registers and LayerScale", "transformers ViT")
"""Models of images of 24 by 40 pixels."""
BLOCK = 1


def pictures(name, batch=4, bright=9.0):
    """Images with one bright patch each, at a different position in each; and the positions."""
    torch.manual_seed(5)
    rows, columns = GRID if name in WIDE else (3, 3)
    x = torch.randn(batch, 3, rows * PATCH, columns * PATCH) * 0.1
    places = [(3 * i + 1) % (rows * columns) for i in range(batch)]
    for image, place in enumerate(places):
        row, column = divmod(place, columns)
        x[image, :, row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH] += (
            bright
        )
    return x, places


def plant(name):
    """A model, its images, and the number of tokens before its patches."""
    model, (x, places) = MODELS[name](), pictures(name)
    return model, x, plant_in(model, x, places)


def plant_in(model, x, places):
    """Make neuron (BLOCK, NEURON) write a huge vector at the bright patch of each image.

    The neuron looks along the difference between the normed streams of bright and dark patches.
    """
    prefix = token_layout(model, x).codes[0].tolist().index(KINDS.index("patch"))
    layer = down_projections(model)[BLOCK]
    mlp = owner(model, layer)
    inner = next(
        module for module in mlp.modules()
        if isinstance(module, nn.Linear) and module.out_features >= layer.in_features
    )  # fmt: skip
    seen = {}
    handle = inner.register_forward_pre_hook(lambda module, args: seen.update(x=args[0]))
    with torch.no_grad():
        model(x)
    handle.remove()
    patches = seen["x"][:, prefix:]
    bright = torch.stack([patches[i, place] for i, place in enumerate(places)]).mean(0)
    dark = patches.mean((0, 1))
    direction = bright - dark
    middle = (bright + dark) / 2 @ direction
    gain = 16 / ((bright - dark) @ direction)
    torch.manual_seed(1)
    with torch.no_grad():
        inner.weight[NEURON] = gain * direction
        inner.bias[NEURON] = -gain * middle
        layer.weight[:, NEURON] = torch.randn(layer.out_features) * 40
        if hasattr(mlp, "up_proj"):
            mlp.up_proj.weight[NEURON], mlp.up_proj.bias[NEURON] = 0, 1.0
    return prefix


def owner(model, layer):
    return next(m for m in model.modules() if any(child is layer for child in m.children()))


def norms(model, x, block):
    """Norms of what the block hands on."""
    seen = {}
    module = find_blocks(model)[block].module
    handle = module.register_forward_hook(
        lambda module, args, out: seen.update(out=out[0] if isinstance(out, tuple) else out)
    )
    with torch.no_grad():
        model(x)
    handle.remove()
    return seen["out"].norm(dim=-1)


@pytest.mark.parametrize("name", MODELS)
def test_the_planted_neuron_is_found_and_its_outliers_leave_the_patches(name):
    model, x, prefix = plant(name)
    before, plain = state_of(model), norms(model, x, BLOCK)
    ratio = plain[:, prefix:] / plain[:, prefix:].median(1, keepdim=True).values
    assert (ratio.amax(1) > 100).all()  # they were planted
    found = find_register_neurons(model, [x[:3], x[3:]])
    assert state_of(model) == before
    assert found.neurons[0] == (BLOCK, NEURON) and found.prefix == prefix
    assert f"4 of 4 images after block {BLOCK}" in found.evidence
    handle = mitigate(model, RegisterNeurons(((BLOCK, NEURON),), prefix))
    after = norms(model, x, BLOCK)
    assert after.shape == plain.shape
    assert (after[:, prefix:] < 0.05 * plain.max()).all()
    # What is left of a bright patch is what it has without the neuron.
    silent = copy.deepcopy(model)
    mitigated(silent).undo()
    down_projections(silent)[BLOCK].weight.data[:, NEURON] = 0
    torch.testing.assert_close(
        after[:, prefix:], norms(silent, x, BLOCK)[:, prefix:], rtol=0.3, atol=0.3
    )
    with pytest.raises(InputError, match="has registers already; call undo"):
        find_register_neurons(model, [x])
    handle.undo()
    assert state_of(model) == before and torch.equal(norms(model, x, BLOCK), plain)


@pytest.mark.parametrize("name", MODELS)
def test_each_image_apart(name):
    """Two equal images give two equal outputs, and an image the same in any company."""
    model, x, prefix = plant(name)
    mitigate(model, RegisterNeurons(((BLOCK, NEURON), (0, 2), (BLOCK, 5)), prefix))
    with torch.no_grad():
        first = leading(model(torch.cat([x[:1], x[:1]])))
        other = leading(model(x))
    torch.testing.assert_close(first[0], first[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(other[0], first[0], rtol=1e-4, atol=1e-4)


def leading(out):
    return out if isinstance(out, torch.Tensor) else out[0]


def test_each_neuron_apart_by_hand():
    acts = torch.tensor(
        [
            [[0.0, 0, 0], [9, 9, 9], [1, -5, 2], [-3, 4, 2], [2, 1, 7]],
            [[0.0, 0, 0], [9, 9, 9], [8, 0, -1], [0, 0, -2], [0, -1, 0]],
        ]
    )
    found = move_to_first_token(acts, [0, 1], start=2)
    assert found[0].tolist() == [[-3, -5, 0], [9, 9, 9], [0, 0, 2], [0, 0, 2], [0, 0, 7]]
    assert found[1].tolist() == [[8, -1, 0], [9, 9, 9], [0, 0, -1], [0, 0, -2], [0, 0, 0]]
    assert acts[0, 3, 0] == -3  # the model's own tensor is left alone


def test_the_share_is_that_of_the_norm():
    """A float64 loop over outliers, neurons and patches."""
    model, x, prefix = plant("timm with registers and LayerScale")
    down_projections(model)[BLOCK].weight.data[:, NEURON] /= 8  # so that others count too
    found = find_register_neurons(model, [x])
    search = _Search(model, 3.0)
    search.norms([x])
    measured = search.shares([x], BLOCK)[BLOCK]
    streams, acts = [], []
    block, layer = model.blocks[BLOCK], down_projections(model)[BLOCK]
    block.register_forward_hook(lambda module, args, out: streams.append(out.double()))
    layer.register_forward_pre_hook(lambda module, args: acts.append(args[0].double()))
    with torch.no_grad():
        model(x)
    stream, act = streams[0], acts[0]
    norm = stream[:, prefix:].norm(dim=-1)
    outlier = norm >= 3 * norm.median(1, keepdim=True).values
    mean = act[:, prefix:][~outlier].mean(0)
    write = layer.weight.double() * block.ls2.gamma.double()[:, None]
    shares = torch.zeros(layer.in_features, dtype=torch.float64)
    for image, token in torch.nonzero(outlier).tolist():
        end = stream[image, prefix + token]
        for neuron in range(layer.in_features):
            push = (act[image, prefix + token, neuron] - mean[neuron]) * (write[:, neuron] @ end)
            shares[neuron] += push / end.square().sum()
    shares /= outlier.sum()
    torch.testing.assert_close(measured, shares, rtol=1e-3, atol=1e-8)
    here = [neuron for number, neuron in found.neurons if number == BLOCK]
    assert here == [n for n in shares.argsort(descending=True).tolist() if shares[n] >= 0.01]
    assert f"the first {shares.max():.0%}" in found.evidence
    torch.testing.assert_close(write_directions(block, layer).double(), write)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_without_outliers_says_so_and_stays_as_it_is(name):
    model, (x, _) = MODELS[name](), pictures(name, bright=0.0)
    found = find_register_neurons(model, [x])
    assert found.neurons == () and "no outliers: 0 of 4 images" in found.evidence
    before, plain = state_of(model), leading(model(x))
    with pytest.warns(UserWarning, match="nothing was inserted: no outliers: 0 of 4"):
        handle = mitigate(model, found)
    assert torch.equal(leading(model(x)), plain)
    handle.undo()
    assert state_of(model) == before


def test_outliers_that_no_neuron_makes():
    model, x, _ = plant("timm")
    found = find_register_neurons(model, [x], neuron_share=1.0)
    assert found.neurons == () and "no neuron causes 100% of their norm" in found.evidence


def test_as_many_neurons_as_asked_for():
    model, x, _ = plant("timm")
    assert len(find_register_neurons(model, [x], max_neurons=1).neurons) == 1


def test_few_images_with_an_outlier_are_none():
    model, x, _ = plant("timm")
    dark, _ = pictures("timm", bright=0.0)
    found = find_register_neurons(model, [torch.cat([x[:1], dark])], image_share=0.5)
    assert found.neurons == () and "1 of 5 images" in found.evidence


def test_saved_and_loaded(tmp_path):
    model, x, _ = plant("DINOv2")
    found = find_register_neurons(model, [x])
    mitigate(model, found).save(tmp_path / "model")
    other = sw.load(tmp_path / "model")
    assert torch.equal(leading(other(x)), leading(model(x)))
    kept = mitigated(other).mitigations[0]
    assert kept == found and kept.evidence == found.evidence
    assert token_layout(other, x).codes[0, :2].tolist() == [1, 0]


def test_a_copy_moves_its_own():
    model, x, prefix = plant("timm")
    plain = model(x)
    mitigate(model, RegisterNeurons(((BLOCK, NEURON),), prefix))
    mitigated_out = model(x)
    other = copy.deepcopy(model)
    mitigated(model).undo()
    assert torch.equal(other(x), mitigated_out) and torch.equal(model(x), plain)
    mitigated(other).undo()
    assert torch.equal(other(x), plain)


def test_a_generator_is_read_twice_and_so_refused():
    model, x, _ = plant("timm")
    with pytest.raises(InputError, match="give a list"):
        find_register_neurons(model, (batch for batch in [x]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"norm_ratio": 0.5}, "norm_ratio=0.5 must be at least 1"),
        ({"max_neurons": 0}, "max_neurons=0 must be at least 1"),
        ({"image_share": 0.0}, "image_share=0.0 must be above 0"),
        ({"neuron_share": 2.0}, "neuron_share=2.0 must be above 0"),
    ],
)
def test_unusable_options_are_named(options, words):
    model, _ = build("timm-vit-sdpa")
    with pytest.raises(InputError, match=words):
        find_register_neurons(model, [torch.randn(1, 3, *IMAGE)], **options)


def test_unusable_models_and_inputs_are_named():
    model, inputs = build("bert-sdpa")
    with pytest.raises(InputError, match="inputs has no patches"):
        find_register_neurons(model, [inputs])
    causal, _ = build("gpt2-sdpa")
    with pytest.raises(InputError, match="is a GPT2Block"):
        find_register_neurons(causal, [ids()])
    model, (x,) = build("timm-vit-sdpa")
    with pytest.raises(InputError, match="inputs has no images"):
        find_register_neurons(model, [])
    with pytest.raises(InputError, match="give images to a model"):
        find_register_neurons(model, [x[0]])
    with pytest.raises(InputError, match="training mode"):
        find_register_neurons(model.train(), [x])


@pytest.mark.parametrize("neurons", [((2, 0),), ((0, 160),), ((-1, 0),), ((0, -1),)])
def test_neurons_that_are_not_there(neurons):
    model, _ = build("timm-vit-sdpa")
    before = state_of(model)
    with pytest.raises(InputError, match="does not exist: VisionTransformer has 2 blocks with 160"):
        mitigate(model, RegisterNeurons(neurons, 1))
    assert state_of(model) == before


def test_a_negative_prefix_is_refused():
    with pytest.raises(InputError, match="prefix=-1"):
        RegisterNeurons((), -1)


def test_learned_registers_and_these_are_two_answers():
    model, _ = build("timm-vit-sdpa")
    before = state_of(model)
    with pytest.raises(InputError, match="give Registers or RegisterNeurons, not both"):
        mitigate(model, Registers(2), RegisterNeurons(((0, 1),), 1))
    assert state_of(model) == before
