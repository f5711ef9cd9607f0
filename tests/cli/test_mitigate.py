"""`sinkwise mitigate`, run as a user runs it, and what `sinkwise diagnose` makes of its folder."""

import json

import polars as pl
import pytest
import torch
from PIL import Image
from transformers import BertConfig, BertModel, Dinov2Config, Dinov2Model

import sinkwise as sw
from sinkwise.hosts.loading.source import IMAGENET_MEAN, IMAGENET_STD, ImagePreprocessing
from sinkwise.mitigations.gate import Gate
from sinkwise.mitigations.registers import Registers
from tests.command import sinkwise
from tests.mitigations.test_register_neurons import BLOCK, NEURON, plant_in
from tests.tokenizers import word_tokenizer

WORDS = ["the", "sink", "draws", "attention", "from", "every", "query"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("mitigate")
    torch.manual_seed(0)
    tokenizer = word_tokenizer(WORDS)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=24, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=3, max_position_embeddings=64,
    )  # fmt: skip
    BertModel(config).save_pretrained(root / "bert")
    tokenizer.save_pretrained(root / "bert")
    (root / "book.txt").write_text(" ".join(WORDS * 60))
    vision = Dinov2Config(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, image_size=56, patch_size=14
    )
    model = Dinov2Model(vision).eval()
    (root / "photos").mkdir()
    for index in range(3):
        picture = Image.new("RGB", (56, 56), (40 * index, 90, 120))
        picture.paste((255, 255, 255), (14, 14, 28, 28))
        picture.save(root / "photos" / f"{index}.png")
    model.save_pretrained(root / "vit")
    pictures = sw.images(root / "photos", samples=3, batch_size=3)
    (x,) = pictures.batches(ImagePreprocessing(56, IMAGENET_MEAN, IMAGENET_STD))
    plant_in(model, x, [5, 5, 5])
    model.save_pretrained(root / "planted")
    return root


def test_a_mitigated_model_is_saved_and_diagnosed(folder):
    done = sinkwise(
        "mitigate", "bert", "--gate", "headwise", "--registers", 4, "--out", "gated", cwd=folder
    )
    assert done.returncode == 0, done.stderr
    # Two layers, three heads: a row of 24 weights and a bias each; four tokens of 24 numbers.
    assert "246 new parameters" in done.stdout
    loaded = sw.mitigated(sw.load(folder / "gated"))
    assert loaded.mitigations == (Gate("headwise"), Registers(4))
    done = sinkwise("diagnose", "gated", "--text", "book.txt", "--samples", 2, "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["sites_unknown"] == [] and facts["samples"] == 2
    layers = pl.read_parquet(folder / "scan" / "layers.parquet")
    assert (layers["received_register"] > 0).all()


@pytest.mark.parametrize(("softmax", "added"), [("learnable", 6), ("off-by-one", 0)])
def test_sink_logits_are_saved_and_diagnosed(folder, softmax, added):
    arguments = ("mitigate", "bert", "--sink-logits", softmax, "--out", softmax, "--json")
    done = sinkwise(*arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["parameters_added"] == added
    assert facts["mitigations"] == [f"SinkLogits(softmax='{softmax}', init=0.0)"]
    done = sinkwise(
        "diagnose", softmax, "--text", "book.txt", "--samples", 2, "--out", f"scan-{softmax}",
        "--json", cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    layers = pl.read_parquet(folder / f"scan-{softmax}" / "layers.parquet")
    kinds = ("cls", "text", "special")
    received = layers.select(pl.sum_horizontal(f"received_{kind}" for kind in kinds)).to_series()
    # 64 scores near 0 beside one logit of 0.
    assert received.to_list() == pytest.approx([64 / 65] * 2, abs=1e-3)


def test_as_json(folder):
    done = sinkwise(
        "mitigate", "bert", "--gate", "elementwise", "--init", "paper", "--out", "paper", "--json",
        cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["parameters_added"] == 2 * (24 * 24 + 24)
    assert facts["mitigations"] == ["Gate(kind='elementwise', init='paper')"]


def test_a_test_time_register(folder):
    arguments = ("--test-time-register", "--images", "photos", "--samples", 3)
    done = sinkwise("mitigate", "vit", *arguments, "--out", "none", cwd=folder)
    assert done.returncode == 2 and "vit needs no test-time register: " in done.stderr
    assert not (folder / "none").exists()
    done = sinkwise("mitigate", "planted", *arguments, "--out", "moved", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    found = sw.mitigated(sw.load(folder / "moved")).mitigations[0]
    assert found.neurons[0] == (BLOCK, NEURON) and found.prefix == 1
    done = sinkwise("diagnose", "moved", "--images", "photos", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--out", "new"), "nothing to add: give one or more of --gate"),
        (("--init", "paper", "--out", "new"), "--init paper applies to --gate only"),
        (
            ("--gate", "open", "--out", "new"),
            "sinkwise: --gate 'open' is none of elementwise, headwise",
        ),
        (("--gate", "headwise", "--init", "x", "--out", "new"), "sinkwise: --init 'x' is none of"),
        (
            ("--sink-logits", "two", "--out", "new"),
            "sinkwise: --sink-logits 'two' is none of learnable, off-by-",
        ),
        (("--gate", "headwise", "--out", "bert"), "is not empty"),
        (("--test-time-register", "--out", "new"), "must be given together"),
        (
            ("--gate", "headwise", "--samples", "3", "--out", "new"),
            "--samples 3 applies to --images only",
        ),
        (("--images", "photos", "--gate", "headwise", "--out", "new"), "must be given together"),
        (("--registers", "0", "--out", "new"), "sinkwise: --registers 0 must be at least 1"),
    ],
)
def test_a_mistake_is_one_clear_line(folder, arguments, word):
    done = sinkwise("mitigate", "bert", *arguments, cwd=folder)
    assert done.returncode == 2
    assert word in done.stderr and done.stderr.count("\n") == 1
    assert not (folder / "new").exists()
