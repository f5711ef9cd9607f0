"""The gate in timm's and Qwen3-Next's weights: equal outputs, there and back."""

import itertools
from functools import partial

import pytest
import torch
from timm.layers.attention import Attention, AttentionRope

from sinkwise.errors import InputError
from sinkwise.nn.attention import GatedAttention
from sinkwise.nn.gate import OutputGate
from sinkwise.nn.gate_formats import from_timm, join_query_gate, split_query_gate, to_timm


def drawn(module, seed=0):
    """The module with parameters large enough to matter."""
    random = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=random)
    return module.eval()


def tokens(dim=15):
    return torch.randn(2, 7, dim, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("gated, bias, out_bias", list(itertools.product([False, True], repeat=3)))
def test_from_timm_and_back(gated, bias, out_bias):
    theirs = Attention(15, 3, attn_head_dim=4, qkv_bias=bias, proj_bias=out_bias, gated=gated)
    state = torch.get_rng_state()
    ours = from_timm(drawn(theirs))
    back = to_timm(ours)
    assert torch.equal(torch.get_rng_state(), state)
    x, wanted = tokens(), theirs(tokens())
    assert wanted.abs().max() > 0.1
    torch.testing.assert_close(ours(x), wanted, atol=1e-6, rtol=0)
    torch.testing.assert_close(back(x), wanted, atol=1e-6, rtol=0)
    assert not ours.training and not back.training
    assert all(parameter.requires_grad for parameter in back.parameters())
    assert torch.equal(back.qkv.weight, theirs.qkv.weight)
    theirs.qkv.weight.data.zero_()
    assert ours.q_proj.weight.abs().max() > 0.1  # a copy


@pytest.mark.parametrize("gate", ["elementwise", "headwise", None])
@pytest.mark.parametrize("bias", [False, True])
def test_to_timm(gate, bias):
    ours = drawn(GatedAttention(15, 3, gate=gate, qkv_bias=bias, out_bias=True, dropout_p=0.25))
    theirs = to_timm(ours)
    torch.testing.assert_close(theirs(tokens()), ours(tokens()), atol=1e-6, rtol=0)
    assert theirs.attn_drop.p == 0.25 and from_timm(theirs).dropout_p == 0.25
    torch.testing.assert_close(from_timm(theirs)(tokens()), ours(tokens()), atol=1e-6, rtol=0)


def test_dtype_is_kept():
    ours = from_timm(Attention(15, 3, gated=True, dtype=torch.bfloat16))
    assert ours.q_proj.weight.dtype == ours.gate.proj.bias.dtype == torch.bfloat16
    assert to_timm(ours).qkv.weight.dtype == torch.bfloat16


def test_torchs_default_device_makes_no_difference():
    theirs, q_proj = Attention(15, 3, gated=True), torch.nn.Linear(15, 48)
    with torch.device("meta"):
        ours, (_, gate) = from_timm(theirs), split_query_gate(q_proj, 3)
    assert torch.equal(ours.gate.proj.weight, theirs.gate.weight)
    assert gate.proj.weight.device.type == "cpu"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"qk_norm": True, "norm_layer": torch.nn.LayerNorm}, "attention.q_norm is a LayerNorm"),
        ({"scale_norm": True, "norm_layer": torch.nn.LayerNorm}, "attention.norm is a LayerNorm"),
        ({"proj_drop": 0.5}, "attention.proj_drop=0.5 must be 0"),
        ({"dim_out": 16}, "attention.proj has 16 output channels.* must have 15"),
    ],
)
def test_what_ours_has_not(options, message):
    with pytest.raises(InputError, match=message):
        from_timm(Attention(15, 3, **options))


def test_another_class_of_timm():
    with pytest.raises(InputError, match=r"must be a timm.layers.Attention, not .*AttentionRope"):
        from_timm.__wrapped__(AttentionRope(16, 2, gated=True))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_kv_heads": 1}, "num_kv_heads=1 must equal num_heads=3"),
        ({"softmax": "learnable"}, "softmax='learnable' must be 'vanilla'"),
        ({"is_causal": True}, "is_causal=True cannot be stored"),
    ],
)
def test_what_timm_has_not(options, message):
    with pytest.raises(InputError, match=message):
        to_timm(GatedAttention(15, 3, **options))


def test_a_timm_without_a_gate(monkeypatch):
    class Old(torch.nn.Module):
        def __init__(self, dim, num_heads=8):
            super().__init__()

    monkeypatch.setattr("timm.layers.attention.Attention", Old)
    with pytest.raises(InputError, match=r"timm \d.* has no Attention\(gated=...\)"):
        to_timm(GatedAttention(15, 3))


def qwen(bias):
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

    config = qwen3_next.Qwen3NextConfig(
        hidden_size=15,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        attention_bias=bias,
        attn_implementation="eager",
    )
    module = drawn(qwen3_next.Qwen3NextAttention(config, 0))
    rotary = qwen3_next.Qwen3NextRotaryEmbedding(config)
    position = rotary(tokens(), torch.arange(7)[None].expand(2, -1))
    return partial(run_qwen, module, position), module


def run_qwen(module, position, x, q_proj=None):
    """(output, what o_proj reads) of a Qwen3-Next layer, with this q_proj."""
    read = []
    kept = module.q_proj
    module.q_proj = kept if q_proj is None else q_proj
    handle = module.o_proj.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    out, _ = module(x, position, None)
    handle.remove()
    module.q_proj = kept
    return out, read[0]


@pytest.mark.parametrize("bias", [False, True])
def test_qwen(bias):
    run, module = qwen(bias)
    query, gate = split_query_gate(module.q_proj, 6)
    wanted, _ = run(tokens())
    # The heads, from their layer with an open gate (sigmoid(40) = 1).
    wide_open = OutputGate(48, 6, in_dim=15)
    torch.nn.init.zeros_(wide_open.proj.weight)
    torch.nn.init.constant_(wide_open.proj.bias, 40.0)
    ungated, heads = run(tokens(), join_query_gate(query, wide_open))
    assert (ungated - wanted).abs().max() > 0.1
    found = module.o_proj(gate(heads, tokens()))
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)
    joined = join_query_gate(query, gate)
    assert torch.equal(joined.weight, module.q_proj.weight)
    assert (joined.bias is None) == (not bias)
    assert not bias or torch.equal(joined.bias, module.q_proj.bias)

    # A gate of ours in their layer.
    for kind in ("elementwise", "headwise"):
        ours = drawn(OutputGate(48, 6, in_dim=15, kind=kind), seed=1)
        out, gated = run(tokens(), join_query_gate(query, ours))
        torch.testing.assert_close(gated, ours(heads, tokens()), atol=1e-6, rtol=1e-6)
        assert (out - wanted).abs().max() > 0.1


def test_splitting_leaves_the_random_state_alone():
    q_proj, state = torch.nn.Linear(15, 48), torch.get_rng_state()
    split_query_gate(q_proj, 3)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_does_not_fit():
    with pytest.raises(InputError, match=r"q_proj has 48 output channels.*2 \* num_heads=10"):
        split_query_gate(torch.nn.Linear(15, 48), 5)
    gate = OutputGate(24, 3, in_dim=15)
    with pytest.raises(InputError, match="gate has 24 channels, the queries 12"):
        join_query_gate(torch.nn.Linear(15, 12), gate)
    with pytest.raises(InputError, match="must fit each other"):
        join_query_gate(torch.nn.Linear(14, 24), gate)
    with pytest.raises(InputError, match="must fit each other"):
        join_query_gate(torch.nn.Linear(15, 25), gate)
