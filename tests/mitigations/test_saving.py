"""Mitigated models as folders: the same outputs, strict names, whole or not at all."""

import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import sinkwise as sw
from sinkwise.errors import InputError
from sinkwise.hosts.loading.load import load_pretrained as load_plain
from sinkwise.hosts.loading.source import ImagePreprocessing, Source, register, source_of
from sinkwise.mitigations.applying import mitigate, mitigated
from sinkwise.mitigations.gate import Gate, HeadGate
from sinkwise.mitigations.loading import load
from sinkwise.mitigations.saving import KEY, WEIGHTS
from tests.models import build, pixels, run, tensors
from tests.tokenizers import word_tokenizer

SAVED = ["vit-sdpa", "dinov2-registers-sdpa", "clip-vision-sdpa", "bert-sdpa", "gpt2-sdpa",
         "llama-sdpa"]  # fmt: skip


def outputs(model, inputs):
    with torch.no_grad():
        return tensors(run(model, inputs))


def scramble(model):
    """What training would do: gates of random weights."""
    for module in model.modules():
        if isinstance(module, HeadGate):
            nn.init.normal_(module.proj.weight)
    return model


def timm_model(**options):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224", pretrained=False, num_classes=3, **options
    ).eval()


@pytest.fixture
def bert(tmp_path):
    """A mitigated model in a folder."""
    model, _ = build("bert-sdpa")
    mitigate(model, Gate()).save(tmp_path / "bert")
    return tmp_path / "bert"


def rewrite(folder, change):
    """Rewrite the folder's file with changed tensors and metadata."""
    state = load_file(folder / WEIGHTS)
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        facts = json.loads(file.metadata()[KEY])
    change(state, facts)
    save_file(state, folder / WEIGHTS, metadata={KEY: json.dumps(facts)})


@pytest.mark.parametrize("name", SAVED)
def test_what_is_loaded_does_what_was_saved(tmp_path, name):
    model, inputs = build(name)
    handle = mitigate(model, Gate("headwise", init="paper"))
    scramble(model)
    handle.save(tmp_path / "model")
    other = load(tmp_path / "model")
    assert type(other) is type(model) and not other.training
    assert list(other.state_dict()) == list(model.state_dict())
    for one, again in zip(outputs(model, inputs), outputs(other, inputs), strict=True):
        assert torch.equal(one, again)
    assert mitigated(other).mitigations == (Gate("headwise", init="paper"),)
    mitigated(other).undo()
    handle.undo()
    for one, again in zip(outputs(model, inputs), outputs(other, inputs), strict=True):
        assert torch.equal(one, again)


def test_timm_models_are_made_again(tmp_path):
    model = timm_model(global_pool="avg")
    handle = mitigate(model, Gate())
    scramble(model)
    handle.save(tmp_path / "model")
    other = load(str(tmp_path / "model"))
    x = pixels((224, 224))
    assert torch.equal(model(x), other(x))
    image = source_of(other).image
    assert image.size == 224 and image.mean == (0.5, 0.5, 0.5)


def test_what_timm_forgot_is_asked_for(tmp_path):
    options = {"img_size": 32, "depth": 2}
    model = timm_model(**options)
    handle = mitigate(model, Gate())
    with pytest.raises(InputError, match=r"builds a different model.*timm_options=\{"):
        handle.save(tmp_path / "model")
    assert not list(tmp_path.iterdir())
    handle.save(tmp_path / "model", timm_options=options)
    x = pixels((32, 32))
    assert torch.equal(load(tmp_path / "model")(x), model(x))
    assert source_of(load(tmp_path / "model")).image is not None


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    import transformers

    config = transformers.GPT2Config(vocab_size=31, n_embd=24, n_layer=1, n_head=3)
    model = transformers.GPT2LMHeadModel(config).eval()
    mitigate(model, Gate()).save(tmp_path / "model")
    assert "lm_head.weight" not in load_file(tmp_path / "model" / WEIGHTS)
    other = load(tmp_path / "model")
    assert other.lm_head.weight is other.transformer.wte.weight
    assert torch.equal(other.lm_head.weight, model.lm_head.weight)


def test_the_tokenizer_and_the_preprocessing_go_along(tmp_path):
    model, _ = build("bert-sdpa")
    register(model, Source("x", tokenizer=word_tokenizer(["sink", "draws"])))
    mitigate(model, Gate()).save(tmp_path / "text")
    assert source_of(load(tmp_path / "text")).tokenizer is not None
    vision, _ = build("dinov2-sdpa")
    image = ImagePreprocessing(24, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bilinear")
    register(vision, Source("x", image=image))
    mitigate(vision, Gate()).save(tmp_path / "vision")
    assert source_of(load(tmp_path / "vision")).image == image


def test_the_dtype_is_the_one_asked_for(tmp_path):
    model, _ = build("llama-sdpa")
    mitigate(model.to(torch.bfloat16), Gate()).save(tmp_path / "model")
    for asked, found in ((None, torch.float32), ("bfloat16", torch.bfloat16)):
        other = load(tmp_path / "model", dtype=asked)
        assert {parameter.dtype for parameter in other.parameters()} == {found}
        assert other.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state, facts: state.pop("pooler.dense.bias"), r"lacks 'pooler.dense.bias' \(1 in"),
        (lambda state, facts: state.update(more=torch.ones(1)), "also has 'more'"),
        (
            lambda state, facts: state.update({"pooler.dense.bias": torch.ones(3)}),
            "has in a different shape 'pooler.dense.bias'",
        ),
        (
            lambda state, facts: facts.update(mitigations=[{"name": "gate", "kind": "headwise"}]),
            "has in a different shape '.*output_gate",
        ),
        (
            lambda state, facts: state.update({"pooler.dense.bias": torch.full((40,), torch.nan)}),
            "has NaN in 'pooler.dense.bias'",
        ),
        (lambda state, facts: facts.update(mitigations=[{"name": "spell"}]), "'spell' is none of"),
        (
            lambda state, facts: facts.update(format=9),
            "has format 9, and this version of sinkwise reads format 1",
        ),
        (
            lambda state, facts: facts["model"].update({"class": "BertForMinds"}),
            "has no model 'BertForMinds'",
        ),
        (lambda state, facts: facts["model"].update({"class": "set_seed"}), "no model 'set_seed'"),
        (
            lambda state, facts: facts.update(mitigations=[{"name": "gate", "colour": "red"}]),
            "cannot be rebuilt: .*colour",
        ),
    ],
)
def test_a_folder_that_is_not_its_models_is_an_error(bert, change, words):
    rewrite(bert, change)
    with pytest.raises(InputError, match=words):
        load(bert)


def test_damaged_files_are_errors(bert):
    content = (bert / WEIGHTS).read_bytes()
    (bert / WEIGHTS).write_bytes(content[: len(content) // 2])
    with pytest.raises(InputError, match="cannot be read"):
        load(bert)
    (bert / WEIGHTS).write_bytes(content)
    (bert / "config.json").write_text("{")
    with pytest.raises(InputError, match="cannot be rebuilt"):
        load(bert)


def test_the_plain_reader_does_not_leave_the_mitigations_out(bert):
    with pytest.raises(InputError, match=WEIGHTS):
        load_plain(str(bert))


def test_a_folder_with_something_in_it_is_left_alone(bert):
    before = {file.name: file.read_bytes() for file in bert.iterdir()}
    with pytest.raises(InputError, match="is not empty"):
        mitigated(load(bert)).save(bert)
    assert {file.name: file.read_bytes() for file in bert.iterdir()} == before


def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch):
    model, _ = build("bert-sdpa")
    handle = mitigate(model, Gate())

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sinkwise.mitigations.saving.save_file", full)
    with pytest.raises(InputError, match="could not be written: No space left"):
        handle.save(tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_an_empty_folder_is_taken_and_is_everybodys_to_read(tmp_path):
    model, _ = build("bert-sdpa")
    (tmp_path / "model").mkdir()
    mitigate(model, Gate()).save(tmp_path / "model")
    mask = os.umask(0o022)
    os.umask(mask)
    assert (tmp_path / "model").stat().st_mode & 0o777 == 0o777 & ~mask
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_models_that_cannot_be_made_again_are_named(tmp_path):
    model, _ = build("timm-vit-sdpa")  # the class called by hand, not timm.create_model
    handle = mitigate(model, Gate())
    with pytest.raises(InputError, match="VisionTransformer cannot be rebuilt"):
        handle.save(tmp_path / "model")
    vit, _ = build("vit-sdpa")
    with pytest.raises(InputError, match=r"timm_options=.*ViTModel is not a model of timm"):
        mitigate(vit, Gate()).save(tmp_path / "model", timm_options={"depth": 2})
    own = type("Own", (type(vit),), {})(vit.config)
    with pytest.raises(InputError, match="Own is not one of transformers' own classes"):
        mitigate(own, Gate()).save(tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_other_models_are_loaded_as_before(tmp_path):
    model, _ = build("bert-sdpa")
    model.save_pretrained(tmp_path / "plain")
    assert mitigated(sw.load(tmp_path / "plain")) is None
    assert sw.load(model) is model
