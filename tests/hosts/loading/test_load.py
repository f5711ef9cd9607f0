"""Models by name, from folders built here: nothing is downloaded."""

import json
import os
import pickle
import subprocess
import sys
import warnings
import weakref
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import nn

from sinkwise.errors import InputError
from sinkwise.hosts.loading import pretrained
from sinkwise.hosts.loading.load import LOADERS
from sinkwise.hosts.loading.load import load_pretrained as load
from sinkwise.hosts.loading.preprocessing import image_preprocessing_in
from sinkwise.hosts.loading.source import ImagePreprocessing, Source, register, source_of

SMALL = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3}
SMALL |= {"intermediate_size": 13}
BERT = hf.BertConfig(vocab_size=29, **SMALL)
LLAMA = hf.LlamaConfig(vocab_size=29, **SMALL)
VIT = hf.ViTConfig(image_size=32, **SMALL)


@pytest.fixture
def bert(tmp_path):
    folder = tmp_path / "bert"
    hf.BertModel(BERT).save_pretrained(folder)
    return folder


def edit(folder, **facts):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | facts))


def as_pickle(folder, content=None):
    """Replace the folder's safetensors by pytorch_model.bin."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights if content is None else content, folder / "pytorch_model.bin")


@pytest.mark.parametrize("spell", [str, "hf:{}".format, Path])
def test_a_folder_is_loaded_as_it_was_saved(tmp_path, spell):
    saved = hf.LlamaForCausalLM(LLAMA)
    saved.save_pretrained(tmp_path)
    model = load(spell(tmp_path))
    assert type(model) is hf.LlamaForCausalLM and not model.training
    for name, tensor in saved.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=0)
    assert source_of(model) == Source(str(spell(tmp_path)))


@pytest.mark.parametrize("named", [["BertForReadingMinds"], ["set_seed"], [], None])
def test_without_a_model_class_of_that_name_the_base_model_is_taken(bert, named):
    edit(bert, architectures=named)
    assert type(load(str(bert))) is hf.BertModel


@pytest.mark.parametrize("dtype", [None, "bfloat16", torch.float16, "float64"])
def test_the_dtype_is_the_one_asked_for_and_rotary_tables_keep_theirs(tmp_path, dtype):
    expected = getattr(torch, str(dtype or "float32").removeprefix("torch."))
    hf.LlamaForCausalLM(LLAMA).to(torch.bfloat16).save_pretrained(tmp_path)
    model = load(str(tmp_path), dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {expected}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["int8", "half", torch.int64])
def test_another_dtype_is_an_error(bert, dtype):
    with pytest.raises(InputError, match="is none of float32, float16, bfloat16, float64"):
        load(str(bert), dtype=dtype)


@pytest.mark.parametrize("device", ["cuda:97", "xpu", "gpu", "meta"])
def test_a_device_that_is_not_there_is_an_error(bert, device):
    with pytest.raises(InputError, match=f"device='{device}' is n"):
        load(str(bert), device=device)


def test_the_apple_gpu_is_an_error_elsewhere(bert, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(InputError, match="no Apple GPU"):
        load(str(bert), device="mps")


def test_a_module_is_returned_as_it_is():
    layer = nn.Linear(3, 5)
    assert load(layer) is layer and layer.training and source_of(layer) is None
    with pytest.raises(InputError, match=r"use module\.to"):
        load(layer, dtype="float32")


def test_a_source_leaves_no_trace_and_keeps_nothing_alive():
    layer = nn.Linear(3, 5)
    before = set(vars(layer))
    source = Source("demo:x", image=ImagePreprocessing(8, (0.5,) * 3, (0.5,) * 3))
    register(layer, source)
    assert source_of(layer) is source
    assert set(vars(layer)) == before
    watched = weakref.ref(layer)
    del layer
    assert watched() is None


@pytest.mark.parametrize("spec", ["bert-base", "nope:x", "hf:", "/no/such/folder", "a\0b"])
def test_an_unknown_spec_lists_the_known_ones(spec):
    with pytest.raises(InputError, match="hf:NAME, timm:NAME, open_clip:NAME, hub:NAME, pypi:NAME"):
        load(spec)


def test_another_room_can_add_a_loader(monkeypatch):
    made = nn.Linear(3, 5)
    monkeypatch.setitem(LOADERS, "demo", lambda name: (made, Source(f"demo:{name}")))
    assert load("demo:nop", dtype="float64") is made
    assert made.weight.dtype == torch.float64 and not made.training
    assert source_of(made) == Source("demo:nop")


def test_a_folder_without_config_is_an_error(tmp_path):
    with pytest.raises(InputError, match=r"without config\.json"):
        load(str(tmp_path))


DAMAGED = ["", "{", "[]", "{}", '{"model_type": "nothing"}']
SENSELESS = [{"num_attention_heads": 0}, {"hidden_size": "wide"}, {"hidden_size": 15}]


@pytest.mark.parametrize("config", DAMAGED + SENSELESS)
def test_a_config_that_does_not_fit_is_an_error(bert, config):
    if isinstance(config, str):
        (bert / "config.json").write_text(config)
    else:
        edit(bert, **config)
    with pytest.raises(InputError, match="cannot be loaded"):
        load(str(bert))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_damaged_weights_are_an_error(bert, name):
    if name.endswith("bin"):
        as_pickle(bert)
    (bert / name).write_bytes((bert / name).read_bytes()[:100])
    with pytest.raises(InputError, match="cannot be loaded"):
        load(str(bert))


@pytest.mark.parametrize("name", ["weights.pt", "last.ckpt", None])
def test_a_folder_without_weights_says_what_it_has(bert, name):
    (bert / "model.safetensors").unlink()
    if name:
        torch.save({}, bert / name)
    with pytest.raises(InputError, match=f"this one has {name or 'no weights'}"):
        load(str(bert))


def test_safetensors_win_over_a_pickle_and_a_weights_only_pickle_is_read(bert):
    torch.save({}, bert / "pytorch_model.bin")
    assert isinstance(load(str(bert)), hf.BertModel)  # a warning, so an error, if the pickle won
    as_pickle(bert)
    assert isinstance(load(str(bert)), hf.BertModel)


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("new", [True, False], ids=["zip", "bare"])
def test_a_pickle_that_runs_code_is_refused_and_not_run(bert, tmp_path, new):
    trap = tmp_path / "trap"
    as_pickle(bert, {"embeddings.word_embeddings.weight": Evil(str(trap))})
    if not new:
        (bert / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(str(trap)), 2))
    with pytest.raises(InputError, match="could run code") as caught:
        load(str(bert))
    assert "\n" not in str(caught.value) and not trap.exists()
    # The trap works: loading it without the guard springs it.
    with suppress(
        RuntimeError, TypeError
    ):  # torch runs the code, then finds that it made no weights
        torch.load(bert / "pytorch_model.bin", weights_only=False)
    assert trap.exists()


def test_code_in_a_repository_is_never_run(bert, tmp_path, monkeypatch):
    trap = tmp_path / "trap"
    (bert / "evil.py").write_text(f"open({str(trap)!r}, 'w')\n")
    maps = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}
    edit(bert, model_type="evil", auto_map=maps)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(InputError, match="cannot be loaded"):
        load(str(bert))
    assert not trap.exists()


def test_nan_in_the_weights_is_an_error(bert):
    weights = load_file(bert / "model.safetensors")
    weights["encoder.layer.1.output.dense.weight"][2, 3] = torch.nan
    save_file(weights, bert / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"has NaN in 'encoder\.layer\.1\.output\.dense\.weight'"):
        load(str(bert))


def test_nan_in_a_buffer_is_an_error(monkeypatch):
    """DINOv3's masks are NaN until weights are loaded."""
    made = nn.BatchNorm1d(3)
    made.running_mean.fill_(torch.nan)
    monkeypatch.setitem(LOADERS, "demo", lambda name: (made, Source(name)))
    with pytest.raises(InputError, match="has NaN in 'running_mean'"):
        load("demo:x")


def test_missing_weights_are_counted(bert):
    weights = load_file(bert / "model.safetensors")
    kept = {key: value for key, value in weights.items() if "layer.1.attention" not in key}
    save_file(kept, bert / "model.safetensors", metadata={"format": "pt"})
    count = len(weights) - len(kept)
    with pytest.warns(UserWarning, match=f"{count} weights are not in the checkpoint .*layer.1"):
        load(str(bert))


def test_missing_heads_and_poolers_are_no_news(tmp_path):
    hf.BertForMaskedLM(BERT).save_pretrained(tmp_path)  # it has no pooler
    for architecture in ("BertModel", "BertForSequenceClassification", "BertForMaskedLM"):
        edit(tmp_path, architectures=[architecture])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert type(load(str(tmp_path))).__name__ == architecture


def test_the_tokenizer_comes_along(bert):
    model = load(str(bert))
    assert source_of(model).tokenizer is None
    vocabulary = bert / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "word"]))
    hf.BertTokenizerFast(vocab=str(vocabulary)).save_pretrained(bert)
    model = load(str(bert))
    assert source_of(model).tokenizer("word")["input_ids"] == [2, 5, 3]
    assert source_of(model).image is None


def test_a_damaged_tokenizer_is_said_and_the_model_still_loads(bert):
    (bert / "tokenizer.json").write_text("{")
    with pytest.warns(UserWarning, match="its tokenizer cannot be read"):
        model = load(str(bert))
    assert source_of(model).tokenizer is None


IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
WIDE = {"height": 40, "width": 40}


@pytest.mark.parametrize(
    ("facts", "size"),
    [
        (None, 32),
        ({}, 32),
        ({"size": 48}, 48),
        ({"size": WIDE}, 40),
        ({"size": {"shortest_edge": 48}}, 48),
        ({"size": {"shortest_edge": 48}, "crop_size": 40}, 40),
        ({"size": {"shortest_edge": 48}, "crop_size": WIDE}, 40),
        ({"size": 48, "crop_size": 40, "do_center_crop": False}, 48),
    ],
)
def test_the_size_of_images(tmp_path, facts, size):
    hf.ViTModel(VIT).save_pretrained(tmp_path)
    if facts is not None:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(facts))
    model = load(str(tmp_path))
    assert source_of(model).image == ImagePreprocessing(size, *IMAGENET)


def test_the_colours_and_resampling_of_images(tmp_path):
    hf.ViTModel(VIT).save_pretrained(tmp_path)
    facts = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3, "resample": 2}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(facts))
    model = load(str(tmp_path))
    wanted = ImagePreprocessing(32, (0.5,) * 3, (0.25,) * 3, "bilinear")
    assert source_of(model).image == wanted


def test_the_image_size_of_a_two_tower_config(tmp_path):
    config = SimpleNamespace(vision_config=hf.CLIPVisionConfig(**SMALL))
    assert image_preprocessing_in("x", str(tmp_path), config).size == 224


def test_a_damaged_preprocessing_is_an_error(tmp_path):
    hf.ViTModel(VIT).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(InputError, match=r"preprocessor_config\.json is not JSON"):
        load(str(tmp_path))


def test_the_hub_is_asked_for_no_conversion(bert, monkeypatch):
    key = "DISABLE_SAFETENSORS_CONVERSION"
    monkeypatch.delenv(key, raising=False)
    seen = []
    original = pretrained._pretrained

    def watched(*arguments):
        seen.append(os.environ.get(key))
        return original(*arguments)

    monkeypatch.setattr(pretrained, "_pretrained", watched)
    load(str(bert))
    assert seen == ["1"] and key not in os.environ
    monkeypatch.setenv(key, "no")
    load(str(bert))
    assert os.environ[key] == "no"


def in_hub_cache(cache, name, model):
    """Lay `model` out as huggingface_hub stores a download."""
    revision = "0" * 40
    root = cache / f"models--{name.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(revision)
    model.save_pretrained(root / "snapshots" / revision)
    return root / "snapshots" / revision


HUB = """
import sys
from sinkwise.hosts.loading.load import load_pretrained as load
from sinkwise.hosts.loading.preprocessing import image_preprocessing_in
from sinkwise.hosts.loading.source import source_of
for name in sys.argv[1:]:
    try:
        model = load("hf:" + name)
        print(type(model).__name__, source_of(model).spec, source_of(model).image)
    except ValueError as error:
        print(type(error).__name__, error)
"""


def test_the_hubs_cache_is_read_offline(tmp_path):
    in_hub_cache(tmp_path, "org/safe", hf.BertModel(BERT))
    as_pickle(in_hub_cache(tmp_path, "org/pickle", hf.BertModel(BERT)))
    trap = tmp_path / "trap"
    as_pickle(in_hub_cache(tmp_path, "org/evil", hf.BertModel(BERT)), {"weight": Evil(str(trap))})
    done = subprocess.run(
        [sys.executable, "-c", HUB, "org/safe", "org/pickle", "org/evil", "org/none", "a/b/c"],
        env=os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    safe, pickled, evil, none, impossible = done.stdout.splitlines()
    assert safe == "BertModel hf:org/safe None"
    assert pickled == "BertModel hf:org/pickle None"
    assert evil.startswith("InputError model 'hf:org/evil' cannot be loaded")
    assert "could run code" in evil and not trap.exists()
    assert none.startswith("InputError model 'hf:org/none' cannot be loaded")
    assert impossible.startswith("InputError model 'hf:a/b/c' cannot be loaded")


def test_timm_brings_its_preprocessing(monkeypatch):
    timm = pytest.importorskip("timm")
    original = timm.create_model

    def random(name, pretrained):
        assert pretrained
        return original(name, depth=1, embed_dim=12, num_heads=3)

    monkeypatch.setattr(timm, "create_model", random)
    model = load("timm:vit_tiny_patch16_224", dtype="bfloat16")
    assert next(model.parameters()).dtype == torch.bfloat16 and not model.training
    image = ImagePreprocessing(224, (0.5,) * 3, (0.5,) * 3)
    assert source_of(model) == Source("timm:vit_tiny_patch16_224", image=image)


def test_timm_models_without_pretrained_weights_are_errors():
    timm = pytest.importorskip("timm")
    with pytest.raises(InputError, match="'timm:vit_nope' cannot be loaded: Unknown model"):
        load("timm:vit_nope")
    pretrained = {name.split(".")[0] for name in timm.list_pretrained()}
    bare = next(name for name in timm.list_models("vit_*") if name not in pretrained)
    with pytest.raises(InputError, match="cannot be loaded"):
        load(f"timm:{bare}")


def test_without_timm_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(InputError, match=r"pip install 'sinkwise\[vision\]'"):
        load("timm:vit_tiny_patch16_224")
