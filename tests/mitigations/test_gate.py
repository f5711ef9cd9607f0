"""Gates in existing models: no change until trained, they close, and undo removes them."""

import copy

import pytest
import torch
from torch import nn

from sinkwise.conformance.traces import state_of
from sinkwise.diagnosis.rules import Rules
from sinkwise.errors import InputError
from sinkwise.hosts.sites import attention_sites
from sinkwise.mitigations.applying import mitigate, mitigated
from sinkwise.mitigations.gate import SUBMODULE, Gate, HeadGate
from sinkwise.mitigations.register_neurons import RegisterNeurons
from sinkwise.mitigations.registers import Registers
from sinkwise.mitigations.sink_logits import SinkLogits
from sinkwise.scanning.fingerprint import facts
from tests.models import build, run, tensors

FAMILIES = [
    "timm-vit-sdpa",
    "timm-vit-registers-eager",
    "timm-vit-qk-norm-sdpa",
    "timm-deit-distilled-sdpa",
    "timm-eva-grouped-sdpa",
    "timm-dinov3-sdpa",
    "vit-sdpa",
    "vit-eager",
    "deit-sdpa",
    "dinov2-sdpa",
    "dinov2-registers-sdpa",
    "dinov3-sdpa",
    "clip-vision-sdpa",
    "clip-sdpa",
    "siglip-text-sdpa",
    "bert-sdpa",
    "bert-eager",
    "roberta-sdpa",
    "gpt2-sdpa",
    "gpt2-eager",
    "gpt-neox-sdpa",
    "llama-sdpa",
    "llama-eager",
    "llama-left-sdpa",
    "mistral-sdpa",
    "qwen2-sdpa",
    "qwen3-sdpa",
    "gemma-3-sdpa",
    "phi-3-sdpa",
]
KINDS = ("elementwise", "headwise")


def outputs(model, inputs):
    with torch.no_grad():
        return tensors(run(model, inputs))


def same_bits(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


def gates(model):
    return [module for module in model.modules() if isinstance(module, HeadGate)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_identity_changes_no_bit_and_undo_leaves_no_trace(name, kind):
    model, inputs = build(name)
    before, plain = state_of(model), outputs(model, inputs)
    handle = mitigate(model, Gate(kind))
    assert same_bits(outputs(model, inputs), plain)
    assert len(gates(model)) == len(attention_sites(model))
    handle.undo()
    assert state_of(model) == before
    assert same_bits(outputs(model, inputs), plain)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_gate_gets_a_gradient_and_changes_the_output(name, kind):
    model, inputs = build(name)
    plain = outputs(model, inputs)
    mitigate(model, Gate(kind))
    answer = tensors(run(model, inputs))
    sum(out.float().square().sum() for out in answer).backward()
    for gate in gates(model):
        for parameter in gate.parameters():
            assert parameter.grad is not None and parameter.grad.abs().max() > 0
            parameter.data -= 10 * parameter.grad / parameter.grad.abs().max()
    assert not same_bits(outputs(model, inputs), plain)


@pytest.mark.parametrize("name", ["timm-vit-sdpa", "bert-sdpa", "gpt2-eager", "llama-sdpa"])
def test_a_closed_gate_leaves_the_bias_of_w_o_alone(name):
    """Closing every gate is W_O on zeros: what a head does when it has nothing to add."""
    model, inputs = build(name)
    mitigate(model, Gate("headwise"))
    closed = copy.deepcopy(model)
    for gate in gates(closed):
        nn.init.constant_(gate.proj.bias, -1e4)
    mitigated(model).undo()
    for site in attention_sites(model).values():
        site.o.zero_()
    expected, found = outputs(model, inputs), outputs(closed, inputs)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other)


def test_the_factor_is_that_of_the_attention_input_before_w_o():
    """Against the formula written out on one timm layer, weights of the gate drawn at random."""
    model, inputs = build("timm-vit-sdpa")
    mitigate(model, Gate("elementwise", init="paper"))
    attention = model.blocks[0].attn
    gate = getattr(attention, SUBMODULE).proj
    nn.init.normal_(gate.weight)
    seen = {}
    attention.register_forward_pre_hook(lambda m, a: seen.update(x=a[0]))
    attention.register_forward_hook(lambda m, a, out: seen.update(out=out))
    outputs(model, inputs)
    x = seen["x"]
    q, k, v = attention.qkv(x).unflatten(-1, (3, 5, 8)).permute(2, 0, 3, 1, 4)
    heads = (q @ k.mT * 8**-0.5).softmax(-1) @ v
    factor = torch.sigmoid(x @ gate.weight.T + gate.bias)
    expected = attention.proj.weight @ (heads.transpose(1, 2).flatten(2) * factor).mT
    expected = expected.mT + attention.proj.bias
    torch.testing.assert_close(seen["out"], expected)


def test_a_scan_s_checksum_tells_the_starts_apart():
    """The gain is no weight, so it is in the words that a scan's fingerprint is made of."""
    model, _ = build("timm-vit-sdpa")
    told = []
    for init in ("identity", "paper"):
        with mitigate(model, Gate(init=init)):
            for gate in gates(model):
                nn.init.zeros_(gate.proj.weight)
                nn.init.zeros_(gate.proj.bias)
            told.append(facts(model, "x", {}, Rules(), None, None, torch.device("cpu")))
    assert told[0]["weights"] == told[1]["weights"] and told[0] != told[1]


def test_the_papers_start():
    model, _ = build("timm-vit-sdpa")
    mitigate(model, Gate("elementwise", init="paper"))
    for gate in gates(model):
        assert gate.gain == 1.0 and (gate.proj.bias == 2).all()
        assert gate.proj.weight.std().item() == pytest.approx(1e-3, rel=0.1)


def test_timm_s_own_gate_is_the_same_function():
    timm = pytest.importorskip("timm.layers.attention")
    own = timm.Attention(40, 5, qkv_bias=True, gated=True)
    plain = timm.Attention(40, 5, qkv_bias=True)
    plain.load_state_dict(own.state_dict(), strict=False)
    mitigate(plain, Gate("elementwise", init="paper"))
    getattr(plain, SUBMODULE).proj.load_state_dict(own.gate.state_dict())
    x = torch.randn(2, 7, 40)
    torch.testing.assert_close(plain(x), own(x))


def test_a_seed_decides_the_values_and_the_global_state_is_left_alone():
    model, _ = build("timm-vit-sdpa")
    state = torch.get_rng_state()
    drawn = []
    for seed in (0, 0, 1):
        with mitigate(model, Gate(init="paper"), seed=seed):
            drawn.append(gates(model)[0].proj.weight.clone())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize(
    "mitigation",
    [Gate(init="paper"), Registers(2), SinkLogits(), RegisterNeurons(((0, 1),), 1)],
    ids=lambda mitigation: mitigation.name,
)
def test_torchs_default_device_makes_no_difference(mitigation):
    model, _ = build("timm-vit-sdpa")
    states = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            handle = mitigate(model, mitigation)
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        handle.undo()
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name])


def test_half_precision_stays_half_and_exact():
    model, inputs = build("timm-vit-sdpa")
    model, inputs = model.to(torch.bfloat16), tuple(x.to(torch.bfloat16) for x in inputs)
    plain = outputs(model, inputs)
    mitigate(model, Gate())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert same_bits(outputs(model, inputs), plain)


def test_a_copy_has_gates_and_a_handle_of_its_own():
    model, inputs = build("llama-sdpa")
    before, plain = state_of(model), outputs(model, inputs)
    handle = mitigate(model, Gate())
    other = copy.deepcopy(model)
    for gate in gates(other):
        nn.init.constant_(gate.proj.bias, -3.0)
    assert same_bits(outputs(model, inputs), plain)
    assert not same_bits(outputs(other, inputs), plain)
    mitigated(other).undo()
    assert same_bits(outputs(other, inputs), plain) and not gates(other)
    assert len(gates(model)) == 2
    handle.undo()
    assert state_of(model) == before


def test_generation_with_a_cache_is_gated_too():
    model, inputs = build("llama-sdpa")
    mitigate(model, Gate("headwise"))
    for gate in gates(model):
        nn.init.normal_(gate.proj.weight)
    ids = inputs["input_ids"][:1]
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    cached = model.generate(ids, **settings, use_cache=True)
    assert torch.equal(cached, model.generate(ids, **settings, use_cache=False))


def test_checkpointing_computes_the_same_gradients():
    found = []
    for checkpointed in (False, True):
        model, inputs = build("vit-sdpa")
        mitigate(model, Gate(init="paper"))
        model.train()
        if checkpointed:
            model.activation_checkpointing_enable()
        run(model, inputs).last_hidden_state.square().sum().backward()
        found.append([gate.proj.weight.grad for gate in gates(model)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "open_clip-qk-norm",
            r"'visual.transformer.resblocks.0.attn': its output projection is no",
        ),
        ("qwen3-next-sdpa", "output gate of its own, inside q_proj"),
        ("timm-xcit-sdpa", "its attention has an unknown layout of weights"),
    ],
)
def test_what_takes_no_gate_is_named_and_left_alone(name, words):
    model, _ = build(name)
    before = state_of(model)
    with pytest.raises(InputError, match=words):
        mitigate(model, Gate())
    assert state_of(model) == before


def test_a_gate_of_its_own_is_not_put_a_second_one_on():
    model, _ = build("timm-vit-sdpa")
    for block in model.blocks:
        block.attn.gate = nn.Linear(40, 40)  # where timm's gated=True has it
    with pytest.raises(InputError, match=r"'blocks.0' .*output gate of its own"):
        mitigate(model, Gate())


def test_a_layer_that_does_not_call_w_o_is_an_error_when_it_runs():
    model, inputs = build("timm-vit-sdpa")
    attention = model.blocks[1].attn
    attention.forward = lambda x, **_: x
    mitigate(model, Gate())
    with pytest.raises(
        InputError, match=r"'blocks.1.attn' ran without calling its output projection"
    ):
        outputs(model, inputs)


def test_w_o_called_on_other_tokens_is_an_error():
    model, _ = build("timm-vit-sdpa")
    mitigate(model, Gate())
    with pytest.raises(InputError, match="needs that layer's input"):
        model.blocks[0].attn.proj(torch.randn(2, 3, 40))
    model.blocks[0].attn(torch.randn(2, 3, 40))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((), "mitigate needs at least one mitigation"),
        ((Gate(), Gate("headwise")), "'gate' was given 2 times"),
    ],
)
def test_unusable_arguments_are_named(given, words):
    model, _ = build("timm-vit-sdpa")
    with pytest.raises(InputError, match=words):
        mitigate(model, *given)


def test_what_is_no_model_with_weights_is_named():
    with pytest.raises(Exception, match=r"minilm-l6|is a str"):  # by its type first
        mitigate("pypi:minilm-l6", Gate())
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    with pytest.raises(InputError, match="Linear has no weights yet"):
        mitigate(model, Gate())


@pytest.mark.parametrize("options", [{"kind": "open"}, {"init": "zero"}])
def test_unusable_settings_are_named(options):
    with pytest.raises(Exception, match=next(iter(options.values()))):
        Gate(**options)


def test_twice_is_refused_and_undone_twice_too():
    model, _ = build("timm-vit-sdpa")
    handle = mitigate(model, Gate())
    with pytest.raises(InputError, match="mitigated already"):
        mitigate(model, Gate("headwise"))
    with pytest.raises(InputError, match=r"'attn', which has 'output_gate'"):
        mitigate(model.blocks[0], Gate())
    handle.undo()
    assert mitigated(model) is None
    with pytest.raises(InputError, match=r"undo\(\) was called before"):
        handle.undo()
