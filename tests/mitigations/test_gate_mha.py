"""The gate in models that use `nn.MultiheadAttention`, whatever path torch takes through it."""

import contextlib
import copy

import pytest
import torch
import torch._dynamo  # loaded by the first such gate: not a trace that it leaves
from torch import nn

import sinkwise as sw
from sinkwise.conformance.traces import state_of
from sinkwise.errors import InputError
from sinkwise.mitigations.applying import mitigate, mitigated
from sinkwise.mitigations.gate import SUBMODULE, Gate
from tests.mitigations.test_gate import KINDS, gates, outputs, same_bits
from tests.models import CASES, build, run, tensors

ALONE = [case.name for case in CASES if case.name.startswith("nn-mha")]
FAMILIES = [
    *ALONE, "nn-encoder", "nn-encoder-pre-norm", "nn-encoder-nested", "nn-decoder",
    "nn-transformer", "open_clip", "open_clip-layer-scale", "open_clip-custom",
    "siglip-vision-sdpa",
]  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


@contextlib.contextmanager
def slow_path():
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def randomise(model):
    """Gates of random weights, as training would make them."""
    torch.manual_seed(3)
    for gate in gates(model):
        nn.init.normal_(gate.proj.weight)
        nn.init.normal_(gate.proj.bias)


def layers(model):
    return [part for part in model.modules() if isinstance(part, nn.MultiheadAttention)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_identity_changes_nothing_and_undo_leaves_no_trace(name, kind):
    model, inputs = build(name)
    before, plain = state_of(model), outputs(model, inputs)
    with slow_path():
        slow = outputs(model, inputs)
    handle = mitigate(model, Gate(kind))
    found = outputs(model, inputs)
    assert len(gates(model)) >= len(layers(model))
    # Rows of unlike lengths are attended to by torch's fast path alone.
    assert same_bits(found, slow) or name == "nn-encoder-nested"
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    handle.undo()
    assert state_of(model) == before
    assert same_bits(outputs(model, inputs), plain)


def by_hand(plain, gate, inputs):
    """The heads are what the layer gives with W_O = 1; then the gate's formula, then W_O."""
    bare = copy.deepcopy(plain)
    bare.out_proj.weight.data = torch.eye(40, dtype=torch.float64)
    bare.out_proj.bias.data.zero_()
    heads, weights = run(bare, inputs)
    factor = gate.gain * torch.sigmoid(inputs["query"] @ gate.proj.weight.T + gate.proj.bias)
    if gate.kind == "headwise":
        factor = factor.repeat_interleave(40 // gate.num_heads, -1)
    return (heads * factor) @ plain.out_proj.weight.T + plain.out_proj.bias, weights


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("heads", [5, 4])
def test_the_gate_is_the_formula_in_float64(name, training, kind, heads):
    """Five heads keep torch off its fast path, four would let it go past the gate."""
    model, inputs = build(name)
    model = model.double().train(training)
    model.num_heads, model.head_dim = heads, 40 // heads
    inputs = {
        key: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        for key, value in inputs.items()
    }
    self_attention = inputs["key"].shape == inputs["query"].shape
    if self_attention:  # one tensor, or torch takes no fast path
        inputs["key"] = inputs["value"] = inputs["query"]
    plain = copy.deepcopy(model)
    mitigate(model, Gate(kind))
    randomise(model)
    gate = getattr(model, SUBMODULE)
    with torch.no_grad():
        expected, weights = by_hand(plain, gate, inputs)
        found, own = run(model, inputs)
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(run(model, inputs)[0], expected)  # with gradients, another path
    assert (own is None) == (weights is None)
    if own is not None:
        torch.testing.assert_close(own, weights)


@pytest.mark.parametrize("name", ["nn-encoder", "nn-encoder-pre-norm", "nn-transformer"])
def test_the_fused_encoder_layer_does_not_go_past_the_gate(name):
    model, inputs = build(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout | nn.MultiheadAttention):
            module.p = module.dropout = 0.0
    plain = outputs(model, inputs)
    mitigate(model, Gate())
    randomise(model)
    inference = outputs(model, inputs)
    training = [out.detach() for out in tensors(run(model.train(), inputs))]
    torch.testing.assert_close(inference, training)
    assert all(
        (one - other).abs().max() > 1e-3 for one, other in zip(inference, plain, strict=True)
    )


def test_rows_of_unlike_lengths_are_gated_each():
    """A padding mask becomes a nested tensor in inference: each row as if it were alone."""
    model, inputs = build("nn-encoder-nested")
    mitigate(model, Gate())
    randomise(model)
    (found,) = outputs(model, inputs)
    for row, length in enumerate((13, 10)):
        (alone,) = outputs(model, {"src": inputs["src"][row : row + 1, :length]})
        torch.testing.assert_close(found[row : row + 1, :length], alone)
    assert (found[1, 10:] == 0).all()  # as the plain model has it


def test_a_nested_tensor_with_a_mask_is_torch_s_own_error():
    model, _ = build("nn-mha-plain")
    mitigate(model, Gate())
    rows = torch.nested.nested_tensor([torch.randn(3, 40), torch.randn(2, 40)])
    with torch.no_grad(), pytest.raises(AssertionError, match="NestedTensor outside of its fast"):
        model(rows, rows.clone(), rows)


def test_in_cross_attention_x_is_the_query():
    model, inputs = build("nn-decoder")
    mitigate(model, Gate())
    randomise(model)
    cross, seen = model.layers[0].multihead_attn, {}
    cross.register_forward_pre_hook(lambda module, args: seen.update(x=args))
    getattr(cross, SUBMODULE).proj.register_forward_pre_hook(
        lambda m, args: seen.update(gate=args[0])
    )
    outputs(model, inputs)
    query, memory = seen["x"][0], seen["x"][1]
    assert query.shape[1] == 7 and memory.shape[1] == 13
    assert torch.equal(seen["gate"], query.transpose(0, 1).flatten(0, 1))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_gate_gets_a_gradient(name):
    model, inputs = build(name)
    mitigate(model, Gate())
    sum(out.float().square().sum() for out in tensors(run(model, inputs))).backward()
    for gate in gates(model):
        for parameter in gate.parameters():
            assert parameter.grad is not None and parameter.grad.abs().max() > 0


def test_a_deep_copy_has_gates_of_its_own():
    model, inputs = build("open_clip")
    plain = outputs(model, inputs)
    handle = mitigate(model, Gate())
    other = copy.deepcopy(model)
    randomise(other)
    assert same_bits(outputs(model, inputs), plain)
    assert not same_bits(outputs(other, inputs), plain)
    mitigated(other).undo()
    assert same_bits(outputs(other, inputs), plain) and len(gates(model)) == 4
    handle.undo()
    assert same_bits(outputs(model, inputs), plain)


def test_a_saved_model_has_its_gates(tmp_path):
    """SigLIP pools by an nn.MultiheadAttention."""
    model, inputs = build("siglip-vision-sdpa")
    handle = mitigate(model, Gate("headwise"))
    assert isinstance(model.head.attention, nn.MultiheadAttention)
    randomise(model)
    handle.save(tmp_path / "model")
    other = sw.load(tmp_path / "model")
    assert same_bits(outputs(other, inputs), outputs(model, inputs))


@pytest.mark.parametrize("mitigation", [Gate(), sw.SinkLogits()])
def test_pooling_of_unknown_layout_outside_of_the_blocks_is_left_as_it_is(mitigation):
    model, inputs = build("timm-vit-pool-sdpa")
    mitigate(model, mitigation)
    outputs(model, inputs)
    put_in = {
        name.rpartition(".")[0]
        for name, _ in model.named_modules()
        if name.endswith((SUBMODULE, "sink_logits"))
    }
    assert put_in == {"blocks.0.attn", "blocks.1.attn"}


def test_registers_go_along():
    transformer = pytest.importorskip("open_clip.transformer")
    torch.manual_seed(0)
    model = transformer.VisionTransformer(24, 8, 40, 2, 5, 4.0, output_dim=17).eval()
    x = (torch.randn(2, 3, 24, 24),)
    plain = outputs(model, x)
    handle = mitigate(model, sw.Registers(3), Gate())
    with_registers = outputs(model, x)
    assert not same_bits(with_registers, plain)
    randomise(model)
    assert not same_bits(outputs(model, x), with_registers)
    handle.undo()
    assert same_bits(outputs(model, x), plain)


@pytest.mark.parametrize("name", ["nn-encoder", "nn-mha-weights", "open_clip"])
def test_a_capture_holds_for_a_gated_model(name):
    model, inputs = build(name)
    mitigate(model, Gate())
    randomise(model)
    failed = [
        result
        for result in sw.check_model(model, inputs, on_fail="report")
        if result.status == "failed"
    ]
    # The output projection is no longer a linear map of the heads; all other checks pass.
    assert {result.check for result in failed} <= {"output_projection"}, failed


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_inside_leaves_no_mode_behind(error):
    model, inputs = build("nn-mha-plain")
    mitigate(model, Gate())

    def stop(*_):
        raise error

    getattr(model, SUBMODULE).register_forward_pre_hook(stop)
    with pytest.raises(error):
        run(model, inputs)
    assert torch._C._len_torch_function_stack() == 0


def test_a_layer_that_does_not_multiply_by_w_o_is_an_error_when_it_runs():
    model, inputs = build("nn-encoder")
    attention = model.layers[1].self_attn
    attention.forward = lambda query, *_, **__: (query, None)
    mitigate(model, Gate())
    with pytest.raises(
        InputError, match=r"'layers.1.self_attn' multiplied 0 times by its output projection"
    ):
        outputs(model, inputs)


def test_w_o_on_other_tokens_is_an_error():
    model, inputs = build("nn-mha-plain")
    out_proj = model.out_proj
    model.forward = lambda query, *_, **__: (out_proj(query), None)
    mitigate(model, Gate())
    with pytest.raises(InputError, match="needs the query input with one row per token"):
        outputs(model, inputs)
