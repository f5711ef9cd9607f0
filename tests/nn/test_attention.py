"""GatedAttention against float64 loops for every option, and how it trains."""

import itertools

import numpy as np
import pytest
import torch

from sinkwise.attention.reference import attention
from sinkwise.capturing.capture import capture
from sinkwise.core.records import AttentionMask
from sinkwise.errors import InputError
from sinkwise.nn.attention import GatedAttention
from tests.oracles.arrays import array
from tests.oracles.attention import attention as oracle
from tests.oracles.cases import close

GATES = (None, "elementwise", "headwise")
SOFTMAXES = ("vanilla", "off-by-one", "learnable")
REAL = torch.tensor([[True] * 7, [False, False, True, True, True, True, False]])


def filled(dim=15, num_heads=6, seed=0, **options):
    """A module whose parameters are all large enough to matter, in float64."""
    module = GatedAttention(dim, num_heads, head_dim=5, **options).double().eval()
    random = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.4, generator=random)
    return module


def tokens(dim=15, dtype=torch.float64):
    return torch.randn(2, 7, dim, generator=torch.Generator().manual_seed(9), dtype=dtype)


def expected(module, x, mask):
    """The formula in numpy float64, heads by the oracle's loops."""
    state = {name: array(tensor) for name, tensor in module.state_dict().items()}
    x = array(x)

    def project(name):
        return x @ state[f"{name}.weight"].T + state.get(f"{name}.bias", 0.0)

    def heads(name, count):
        return project(name).reshape(*x.shape[:2], count, 5).transpose(0, 2, 1, 3)

    kv = module.num_kv_heads
    sink = {"vanilla": None, "off-by-one": np.zeros((1, 6, 1))}.get(module.softmax)
    if module.softmax == "learnable":
        sink = state["sink.logit"][None, :, None]
    q, k, v = heads("q_proj", 6), heads("k_proj", kv), heads("v_proj", kv)
    options = {"scale": 5**-0.5, "softcap": None, "mask": mask, "sink_logit": sink}
    _, out, _ = oracle(q, k, v, **options)
    out = out.transpose(0, 2, 1, 3)
    if "gate.proj.weight" in state:
        factor = 1 / (1 + np.exp(-project("gate.proj")))
        out = out * factor.reshape(*x.shape[:2], 6, -1)
    out = out.reshape(*x.shape[:2], 30)
    return out @ state["o_proj.weight"].T + state.get("o_proj.bias", 0.0)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("softmax", SOFTMAXES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_the_formula(gate, softmax, causal, padded):
    options = {"gate": gate, "softmax": softmax, "is_causal": causal}
    module = filled(num_kv_heads=2, qkv_bias=True, out_bias=True, **options)
    x = tokens()
    mask = AttentionMask(causal=causal, allowed=REAL[:, None, None] if padded else None)
    found = module(x, REAL if padded else None)
    close(found, expected(module, x, mask), 1e-12)


@pytest.mark.parametrize("softmax", SOFTMAXES)
@pytest.mark.parametrize("causal", [False, True])
def test_padding_changes_nothing(softmax, causal):
    module, x = filled(softmax=softmax, is_causal=causal), tokens()
    padded = module(x, REAL)
    close(padded[1, 2:6], module(x[1:, 2:6])[0], 1e-13)
    assert torch.isfinite(padded).all()
    other = x.masked_fill(~REAL[..., None], 100.0)
    close(module(other, REAL)[REAL], padded[REAL], 1e-13)


@pytest.mark.parametrize("softmax", SOFTMAXES)
def test_no_query_sees_the_future(softmax):
    module, x = filled(softmax=softmax, is_causal=True), tokens()
    changed = x.clone()
    changed[:, 4:] += 1
    before, after = module(x), module(changed)
    close(after[:, :4], before[:, :4], 1e-13)
    assert (after[:, 4:] - before[:, 4:]).abs().max() > 1e-2


@pytest.mark.parametrize(
    "gate, softmax, bias, real",
    list(itertools.product(GATES, SOFTMAXES, [False, True], [None, REAL])),
)
def test_every_parameter_gets_a_gradient_from_the_start(gate, softmax, bias, real):
    module = GatedAttention(
        15, 3, gate=gate, softmax=softmax, is_causal=True, qkv_bias=bias, out_bias=bias
    )
    module(tokens(dtype=torch.float32), real).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().max() > 1e-9, name


@pytest.mark.parametrize("softmax", SOFTMAXES)
def test_gradients(softmax):
    module = filled(softmax=softmax, num_kv_heads=2, is_causal=True)
    names = [name for name, _ in module.named_parameters()]

    def run(x, *parameters):
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (x,))

    inputs = [tokens()[:1, :3].requires_grad_(), *module.parameters()]
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


def test_a_bias_of_the_keys_would_move_nothing_in_vanilla():
    module, x = filled(softmax="vanilla", qkv_bias=True), tokens()
    assert module.k_proj.bias is None and module.q_proj.bias is not None
    before = module(x)
    module.k_proj.bias = torch.nn.Parameter(torch.randn(30, dtype=torch.float64))
    close(module(x), before, 1e-12)
    other = filled(softmax="off-by-one", qkv_bias=True)
    before = other(x)
    torch.nn.init.zeros_(other.k_proj.bias)
    assert (other(x) - before).abs().max() > 1e-2


def test_names_of_the_state():
    module = GatedAttention(12, 3, softmax="learnable", qkv_bias=True, out_bias=True)
    projections = [f"{name}_proj.{part}" for name in "qkvo" for part in ("weight", "bias")]
    gate = ["gate.proj.weight", "gate.proj.bias"]
    assert set(module.state_dict()) == {*projections, *gate, "sink.logit"}
    plain = GatedAttention(12, 3, gate=None)
    assert list(plain.state_dict()) == [f"{name}_proj.weight" for name in "qkvo"]


def test_drawn_from_the_generator_alone():
    state = torch.get_rng_state()
    one, other = (
        GatedAttention(64, 4, generator=torch.Generator().manual_seed(3)).state_dict()
        for _ in range(2)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert one["q_proj.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(one["q_proj.weight"], one["k_proj.weight"])


@pytest.mark.parametrize("softmax", SOFTMAXES)
@pytest.mark.parametrize("padded", [False, True])
def test_capture_sees_one_call_and_its_sink(softmax, padded):
    module, x = filled(softmax=softmax, num_kv_heads=2, is_causal=True), tokens()
    real = REAL if padded else None
    seen = []

    def keep(record):
        again = attention(
            record.q,
            record.k,
            record.v,
            scale=record.scale,
            mask=record.mask,
            sink_logit=record.sink_logit,
        )
        close(record.out, again.out, 1e-12)
        seen.append((record.k.shape[2], record.sink_logit))

    with capture(module, keep):
        found = module(x, real)
    assert torch.equal(found, module(x, real))
    ((keys, sink),) = seen
    assert keys == 7
    if softmax == "vanilla":
        assert sink is None
    else:
        logit = torch.zeros(6) if module.sink is None else module.sink.logit.detach()
        assert torch.equal(sink[0, :, 0], logit.double())


@pytest.mark.parametrize("softmax", SOFTMAXES)
def test_autocast(softmax):
    module, x = filled(softmax=softmax, is_causal=True).float(), tokens(dtype=torch.float32)
    wanted = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = module(x)
        assert found.dtype == torch.bfloat16
        found.float().square().sum().backward()
    # Every product rounds its inputs to 2^-9; outputs are sums of 30 products near 1.
    assert (found.float() - wanted).abs().max() < 0.03 * wanted.abs().max()
    assert all(torch.isfinite(parameter.grad).all() for parameter in module.parameters())


@pytest.mark.parametrize("softmax", SOFTMAXES)
def test_dropout_in_training_only(softmax):
    module, x = filled(softmax=softmax, dropout_p=0.5), tokens()
    assert torch.equal(module(x), module(x))
    module.train()
    assert not torch.equal(module(x), module(x))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"num_heads": 4}, "dim=15 must be a multiple of num_heads=4"),
        ({"num_heads": 0}, "dim=15 must be a multiple of num_heads=0"),
        ({"num_kv_heads": 2}, "num_heads=3 must be a multiple of num_kv_heads=2"),
        ({"num_kv_heads": 0}, "num_heads=3 must be a multiple of num_kv_heads=0"),
        ({"softmax": "one"}, "softmax='one' must be one of vanilla, off-by-one, learnable"),
        ({"gate": "open"}, "kind='open' must be one of"),
        ({"dropout_p": 1.0}, "dropout_p=1.0 must be at least 0 and below 1"),
    ],
)
def test_unusable_settings_are_named(arguments, message, monkeypatch):
    # Without the tests' own checks of types, as it runs for users.
    from sinkwise.nn.gate import OutputGate

    monkeypatch.setattr(OutputGate, "__init__", OutputGate.__init__.__wrapped__)
    monkeypatch.setattr(GatedAttention, "__init__", GatedAttention.__init__.__wrapped__)
    with pytest.raises(InputError, match=message):
        GatedAttention(**({"dim": 15, "num_heads": 3} | arguments))


def test_a_mask_of_numbers_is_refused():
    module, x = filled(), tokens()
    with pytest.raises(InputError, match=r"real, torch.int64 \(2, 7\), must be bool \(2, 7\)"):
        GatedAttention._mask.__wrapped__(module, x, REAL.long())
