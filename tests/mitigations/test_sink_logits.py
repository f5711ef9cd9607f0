"""Sink logits in models that are already there: the formula, its start, and out again."""

import copy
import math

import pytest
import torch
import torch._dynamo  # loaded by the first nn.MultiheadAttention: not a trace that it leaves
from torch import nn

import sinkwise as sw
from sinkwise.conformance.traces import state_of
from sinkwise.diagnosis.rules import Rules
from sinkwise.errors import InputError
from sinkwise.hosts.sites import attention_sites
from sinkwise.mitigations.applying import mitigate, mitigated
from sinkwise.mitigations.sink_logits import SUBMODULE, HeadLogits, SinkLogits
from sinkwise.scanning.fingerprint import facts
from tests.mitigations.test_gate import FAMILIES as GATED
from tests.mitigations.test_gate import outputs, same_bits
from tests.models import CASES, EXTRA, build, run, tensors
from tests.models.sink_models import FOLDERS

FAMILIES = [
    *GATED, "open_clip", "open_clip-custom", "open_clip-qk-norm", "nn-encoder", "nn-encoder-nested",
    "nn-decoder", "nn-mha-weights", "nn-mha-bias-kv", "nn-mha-sequence-first", "timm-swin-sdpa",
    "timm-swin-eager", "t5-sdpa", "t5-eager", "bart-sdpa", "gemma-2-eager", "bloom-eager",
    "siglip-vision-sdpa", "deberta-v2-eager",
]  # fmt: skip
PAIRS = [
    "timm-vit", "timm-eva-grouped", "timm-swin", "vit", "dinov2", "clip", "bert", "t5", "gpt2",
    "gpt-neox", "llama", "llama-left", "falcon-new", "olmo3", "whisper",
]  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def logits(model):
    return [module for module in model.modules() if isinstance(module, HeadLogits)]


def randomise(model):
    torch.manual_seed(3)
    for module in logits(model):
        nn.init.normal_(module.logit, std=2)


def read(model, inputs):
    """The outputs at tokens: where nothing is seen, a row of padding is another one."""
    found = outputs(model, inputs)
    mask = inputs.get("attention_mask") if isinstance(inputs, dict) else None
    if mask is not None:
        found = [t[mask.bool()] if t.shape[:2] == mask.shape else t for t in found]
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_minus_twenty_leaves_the_outputs_and_undo_leaves_no_trace(name):
    model, inputs = build(name)
    before, plain, tokens = state_of(model), outputs(model, inputs), read(model, inputs)
    handle = mitigate(model, SinkLogits(init=-20.0))
    assert len(logits(model)) == len(attention_sites(model))
    for one, other in zip(read(model, inputs), tokens, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    for module in logits(model):
        nn.init.zeros_(module.logit)
    assert any((a - b).abs().max() > 1e-5 for a, b in zip(read(model, inputs), tokens, strict=True))
    handle.undo()
    assert state_of(model) == before
    assert same_bits(outputs(model, inputs), plain)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_logit_gets_a_gradient(name):
    model, inputs = build(name)
    mitigate(model, SinkLogits())
    sum(out.float().square().sum() for out in tensors(run(model, inputs))).backward()
    for module in logits(model):
        assert module.logit.grad.isfinite().all() and (module.logit.grad != 0).any()


@pytest.mark.parametrize("name", PAIRS)
def test_sdpa_and_eager_agree(name):
    found = []
    for kernel in ("sdpa", "eager"):
        model, inputs = build(f"{name}-{kernel}")
        mitigate(model, SinkLogits())
        randomise(model)
        found.append(read(model, inputs))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def watched(attention):
    """What a module was given and gave, filled in when it runs."""
    seen = {}

    def note(module, args, kwargs, out):
        seen["x"] = args[0] if args else kwargs["hidden_states"]
        seen["out"] = out[0] if isinstance(out, tuple) else out

    attention.register_forward_hook(note, with_kwargs=True)
    return seen


def mixed(q, k, v, logit, seen=None):
    """sum_j exp(s_j) v_j / (exp(b) + sum_j exp(s_j)), with one more column for b."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    column = logit[:, None, None].expand(*scores.shape[:-1], 1)
    powers = torch.cat([scores, column], -1).exp()
    weights = powers / powers.sum(-1, keepdim=True)
    zero = torch.zeros_like(v[:, :, :1])
    return weights @ torch.cat([v, zero], 2)


@pytest.mark.parametrize("name", ["timm-vit-sdpa", "timm-vit-eager"])
def test_a_layer_of_timm_s_vit_by_hand_in_float64(name):
    model, inputs = build(name)
    model = model.double()
    mitigate(model, SinkLogits())
    randomise(model)
    attention = model.blocks[1].attn
    seen = watched(attention)
    outputs(model, tuple(x.double() for x in inputs))
    q, k, v = attention.qkv(seen["x"]).unflatten(-1, (3, 5, 8)).permute(2, 0, 3, 1, 4)
    heads = mixed(q, k, v, attention.sink_logits.logit)
    expected = attention.proj(heads.transpose(1, 2).flatten(2))
    torch.testing.assert_close(seen["out"], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["llama-sdpa", "llama-eager"])
def test_a_layer_of_llama_by_hand_in_float64(name):
    """Rotation as complex numbers, causal order and groups written out."""
    model, inputs = build(name)
    model = model.double()
    model.config._attn_implementation = name.partition("-")[2]
    mitigate(model, SinkLogits())
    randomise(model)
    inputs = {"input_ids": inputs["input_ids"]}
    attention = model.model.layers[1].self_attn
    seen = watched(attention)
    outputs(model, inputs)
    x = seen["x"]
    length = x.shape[1]
    rates = model.model.rotary_emb.inv_freq.double()
    turn = torch.polar(
        torch.ones(1, dtype=torch.float64), torch.arange(length).double()[:, None] * rates
    )

    def heads(projection, rotate):
        parts = projection(x).unflatten(-1, (-1, 8)).transpose(1, 2)
        if rotate:
            turned = torch.complex(*parts.chunk(2, -1)) * turn
            parts = torch.cat([turned.real, turned.imag], -1)
        return parts

    q = heads(attention.q_proj, True)
    k = heads(attention.k_proj, True).repeat_interleave(2, 1)
    v = heads(attention.v_proj, False).repeat_interleave(2, 1)
    seen_keys = torch.ones(length, length).tril().bool()
    out = mixed(q, k, v, attention.sink_logits.logit, seen_keys)
    expected = attention.o_proj(out.transpose(1, 2).flatten(2))
    # transformers rotates by float32 angles.
    torch.testing.assert_close(seen["out"], expected, rtol=1e-6, atol=1e-6)


def test_off_by_one_is_a_logit_fixed_at_zero():
    model, inputs = build("vit-sdpa")
    parameters, names = list(model.parameters()), list(model.state_dict())
    with mitigate(model, SinkLogits("off-by-one")):
        assert list(map(id, model.parameters())) == list(map(id, parameters))
        assert list(model.state_dict()) == names
        fixed = outputs(model, inputs)
        assert all((module.logit == 0).all() for module in logits(model))
    with mitigate(model, SinkLogits()):
        assert same_bits(outputs(model, inputs), fixed)


def test_half_precision_stays_half():
    model, inputs = build("timm-vit-sdpa")
    model = model.to(torch.bfloat16)
    mitigate(model, SinkLogits())
    assert {module.logit.dtype for module in logits(model)} == {torch.bfloat16}
    (out,) = outputs(model, tuple(x.to(torch.bfloat16) for x in inputs))
    assert out.dtype == torch.bfloat16 and out.isfinite().all()


def test_a_deep_copy_has_logits_of_its_own():
    model, inputs = build("llama-sdpa")
    plain = outputs(model, inputs)
    handle = mitigate(model, SinkLogits())
    zero = outputs(model, inputs)
    other = copy.deepcopy(model)
    randomise(other)
    assert same_bits(outputs(model, inputs), zero)
    assert not same_bits(outputs(other, inputs), zero)
    mitigated(other).undo()
    assert same_bits(outputs(other, inputs), plain) and len(logits(model)) == 2
    handle.undo()
    assert same_bits(outputs(model, inputs), plain)


@pytest.mark.parametrize("name", ["timm-vit-sdpa", "open_clip-vision", "bert-sdpa"])
def test_gate_logits_and_registers_together(name):
    if name == "open_clip-vision":
        transformer = pytest.importorskip("open_clip.transformer")
        torch.manual_seed(0)
        model = transformer.VisionTransformer(24, 8, 40, 2, 5, 4.0, output_dim=17).eval()
        inputs = (torch.randn(2, 3, 24, 24),)
    else:
        model, inputs = build(name)
    plain = outputs(model, inputs)
    handle = mitigate(model, sw.Registers(3), sw.Gate(), SinkLogits())
    randomise(model)
    together = outputs(model, inputs)
    handle.undo()
    assert same_bits(outputs(model, inputs), plain)
    mitigate(model, sw.Registers(3), SinkLogits())  # a gate's start changes nothing
    randomise(model)
    for one, other in zip(outputs(model, inputs), together, strict=True):
        torch.testing.assert_close(one, other)
    assert not same_bits(together, plain)


def test_a_scan_s_checksum_tells_the_softmaxes_apart():
    model, _ = build("timm-vit-sdpa")
    told = []
    for given in (SinkLogits("off-by-one"), SinkLogits(), None):
        handle = mitigate(model, given) if given else None
        told.append(facts(model, "x", {}, Rules(), None, None, torch.device("cpu")))
        if handle:
            handle.undo()
    assert told[0] != told[1] and told[1] != told[2] and told[0] != told[2]


@pytest.mark.parametrize("family", FOLDERS)
def test_models_with_sink_logits_of_their_own_are_refused(family):
    case = next(c for c in CASES + EXTRA if c.name == f"{family}-eager")
    model, _ = case.build()
    before = state_of(model)
    with pytest.raises(InputError, match="cannot add sink logits to 'layers"):
        mitigate(model, SinkLogits())
    assert state_of(model) == before


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt-oss-eager", "it has its own sink logits, 'sinks'"),
        ("timm-xcit-sdpa", "its attention has an unknown layout of weights"),
        ("qwen3-next-sdpa", "its attention has an unknown layout of weights"),
    ],
)
def test_what_takes_no_logits_is_named(name, words):
    model, _ = build(name)
    with pytest.raises(InputError, match=words):
        mitigate(model, SinkLogits())


@pytest.mark.parametrize("kernel", ["flash_attention_2", "flex_attention"])
def test_other_kernels_are_refused(kernel):
    model, _ = build("llama-sdpa")
    model.config._attn_implementation = kernel
    with pytest.raises(InputError, match=f"attn_implementation='{kernel}' has no softmax that"):
        mitigate(model, SinkLogits())


def test_a_layer_whose_softmax_cannot_be_joined_is_an_error_when_it_runs():
    model, inputs = build("timm-vit-sdpa")
    model.blocks[1].attn.forward = lambda x, **_: x
    mitigate(model, SinkLogits())
    with pytest.raises(InputError, match=r"'blocks.1.attn' ran 0 softmaxes"):
        outputs(model, inputs)
    assert torch._C._len_torch_function_stack() == 0
    model, inputs = build("diffllama-sdpa")  # the difference of two maps
    mitigate(model, SinkLogits())
    with pytest.raises(InputError, match=r"'layers.0.self_attn' ran 2 softmaxes"):
        outputs(model, inputs)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"softmax": "vanilla"}, "softmax"),
        ({"init": math.nan}, "init=nan must be finite"),
        ({"init": -math.inf}, "init=-inf must be finite"),
        ({"softmax": "off-by-one", "init": -20.0}, "init=-20.0 needs softmax='learnable'"),
    ],
)
def test_unusable_settings_are_named(options, words):
    with pytest.raises(Exception, match=words):
        SinkLogits(**options)


def test_a_start_that_its_dtype_cannot_hold_is_named():
    model, _ = build("timm-vit-sdpa")
    model = model.half()
    before = state_of(model)
    with pytest.raises(
        InputError, match=r"init=100000.0 is not finite in torch.float16, .*'blocks.0.attn'"
    ):
        mitigate(model, SinkLogits(init=1e5))
    assert state_of(model) == before


def test_twice_is_refused():
    model, _ = build("timm-vit-sdpa")
    mitigate(model, SinkLogits())
    with pytest.raises(InputError, match=r"'attn', which has 'sink_logits'; call undo"):
        mitigate(model.blocks[0], SinkLogits())
    assert isinstance(getattr(model.blocks[0].attn, SUBMODULE), HeadLogits)
