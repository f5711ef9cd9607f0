"""Both forms of the sink logit against float64 loops, gpt-oss, and finite differences."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from sinkwise.attention.reference import attention
from sinkwise.capturing.capture import capture
from sinkwise.core.records import AttentionMask
from sinkwise.errors import InputError
from sinkwise.nn.sink_logit import SinkLogitAttention, rescale, sink_attention
from tests.oracles.cases import ADDITIVES, ALLOWED, SINKS, close, make

FORMS = ("column", "rescale")
WIDE = {"head_dim": 7, "value_dim": 7}
SOME_SINKS = SINKS[1:]


def seen(case):
    """The case's mask as one attn_mask, from the oracle's own visibility."""
    visible = torch.from_numpy(case.visible)
    if case.mask.additive is None:
        return visible
    return case.mask.additive.expand(visible.shape).masked_fill(~visible, -math.inf)


def run(case, form, **changes):
    given = {"attn_mask": seen(case), "scale": case.scale, "form": form, **changes}
    return sink_attention(case.q, case.k, case.v, case.sink_logit[0, :, 0], **given)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sink", SOME_SINKS)
@pytest.mark.parametrize("additive", ADDITIVES)
@pytest.mark.parametrize("allowed", ALLOWED)
def test_the_oracle_under_every_mask(form, sink, additive, allowed):
    case = make(group=2, causal=True, allowed=allowed, additive=additive, sink=sink, **WIDE)
    out = run(case, form)
    assert torch.isfinite(out).all()
    close(out, case.expected[1], 1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [False, True])
def test_no_mask_and_the_causal_flag(form, causal):
    case = make(causal=causal, group=2, sink="per head", **WIDE)
    close(run(case, form, attn_mask=None, is_causal=causal), case.expected[1], 1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_the_default_scale(form):
    case = make(sink="per head", **WIDE)
    expected = run(case, form, scale=7**-0.5)
    assert torch.equal(run(case, form, scale=None), expected)
    assert (run(case, form) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("form", FORMS)
def test_a_mask_of_one_row_and_one_key(form):
    case = make(sink="per head", **WIDE)
    plain = run(case, form, attn_mask=None)
    ones = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    close(run(case, form, attn_mask=ones), plain, 1e-14)
    assert (run(case, form, attn_mask=~ones) == 0).all()
    assert (run(case, form, attn_mask=torch.full((1, 1, 1, 1), -1e38)) == 0).all()


@pytest.mark.parametrize("form", FORMS)
def test_the_lowest_value_hides(form):
    case = make(sink=-math.inf, query=5, **WIDE)
    mask = torch.zeros(1, 1, 5, 1, dtype=torch.float32)
    mask[:, :, 2] = torch.finfo(torch.float32).min
    out = run(case, form, attn_mask=mask)
    assert (out[:, :, 2] == 0).all() and (out[:, :, 1] != 0).any()


@pytest.mark.parametrize("form", FORMS)
def test_memory_laid_out_another_way(form):
    case = make(sink="per head", query=9, head_dim=9, value_dim=9)
    q, k, v = (tensor.mT.contiguous().mT for tensor in (case.q, case.k, case.v))
    assert q.stride(-1) != 1
    found = sink_attention(q, k, v, case.sink_logit[0, :, 0], scale=case.scale, form=form)
    close(found, case.expected[1], 1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sink", SOME_SINKS)
def test_queries_without_keys(form, sink):
    case = make(allowed="blank", sink=sink, **WIDE)
    for tensor in (case.q, case.k, case.v):
        tensor.requires_grad_()
    out = run(case, form)
    blank = ~torch.from_numpy(case.visible).any(-1)
    assert blank.any() and (out[blank] == 0).all()
    grads = torch.autograd.grad(out.square().sum(), (case.q, case.k, case.v))
    assert all(torch.isfinite(grad).all() for grad in grads)
    assert (grads[0][blank] == 0).all() and (grads[0][~blank] != 0).any()


@pytest.mark.parametrize("form", FORMS)
def test_keys_hidden_over_more_than_a_tile_of_the_kernel(form):
    case = make(batch=1, kv_head=1, query=3, key=1100, sink="per head", **WIDE)
    hidden = torch.arange(1100) >= torch.tensor([0, 1050, 1100])[:, None]
    out = run(case, form, attn_mask=hidden[None, None])
    mask = AttentionMask(allowed=hidden[None, None])
    options = {"scale": case.scale, "mask": mask, "sink_logit": case.sink_logit}
    close(out, attention(case.q, case.k, case.v, **options).out, 1e-12)


def differentiable(case):
    tensors = (case.q, case.k, case.v, case.sink_logit[0, :, 0])
    return tuple(tensor.detach().clone().requires_grad_() for tensor in tensors)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sink", ["per head", -1e4, 0.0, 100.0])
@pytest.mark.parametrize("mask", ["none", "causal", "blank", "inf"])
def test_gradients(form, sink, mask):
    given = {"allowed": "blank"} if mask == "blank" else {}
    given |= {"additive": "inf"} if mask == "inf" else {}
    sizes = {"batch": 1, "kv_head": 1, "group": 2, "query": 5, "head_dim": 3, "value_dim": 3}
    case = make(causal=mask == "causal", sink=sink, **given, **sizes)
    options = {"form": form, "scale": case.scale, "is_causal": mask == "causal"}
    if given:
        options["attn_mask"] = seen(case)
    assert torch.autograd.gradcheck(
        lambda *tensors: sink_attention(*tensors, **options), differentiable(case)
    )


@pytest.mark.parametrize("form", FORMS)
def test_a_sink_at_minus_infinity_is_plain_attention_and_gets_no_gradient(form):
    case = make(sink=-math.inf, **WIDE)
    inputs = differentiable(case)
    out = sink_attention(*inputs, form=form)
    plain = torch.nn.functional.scaled_dot_product_attention(*inputs[:3])
    close(out, plain, 1e-13)
    found = torch.autograd.grad(out.square().sum(), inputs)
    wanted = torch.autograd.grad(plain.square().sum(), inputs[:3])
    for one, other in zip(found, wanted, strict=False):
        close(one, other, 1e-12)
    assert (found[3] == 0).all()


def test_gradients_of_the_pure_rescaling():
    case = make(query=5, sink="per head")
    plain = attention(case.q, case.k, case.v, scale=case.scale)
    tensors = (plain.out, plain.lse, case.sink_logit[0, :, 0])
    assert torch.autograd.gradcheck(rescale, [tensor.requires_grad_() for tensor in tensors])
    out = torch.randn(1, 1, 2, 3)
    out[:, :, 0] = math.nan  # what softmax makes of a row without keys
    out.requires_grad_()
    lse = torch.tensor([[[-math.inf, 0.5]]], requires_grad=True)
    sink = torch.zeros(1, requires_grad=True)
    scaled = rescale(out, lse, sink)[0]
    assert (scaled[0, 0, 0] == 0).all()
    grads = torch.autograd.grad(scaled.sum(), (out, lse, sink))
    assert all(torch.isfinite(grad).all() for grad in grads)
    assert (grads[0][0, 0, 0] == 0).all() and (grads[0][0, 0, 1] != 0).all()


@pytest.mark.parametrize("sink", SOME_SINKS)
def test_pure_rescaling_of_queries_without_keys(sink):
    case = make(allowed="blank", sink=sink)
    plain = attention(case.q, case.k, case.v, scale=case.scale, mask=case.mask)
    out, lse = rescale(plain.out, plain.lse, case.sink_logit[0, :, 0])
    close(out, case.expected[1], 1e-12)
    close(lse, case.expected[2], 1e-12)
    blank = ~torch.from_numpy(case.visible).any(-1)
    assert (out[blank] == 0).all()
    assert torch.equal(lse[blank], case.sink_logit.expand(lse.shape)[blank])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("allowed", ["none", "query"])
def test_gpt_oss(form, allowed):
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    case = make(group=2, causal=True, allowed=allowed, sink="per head", **WIDE)
    host = SimpleNamespace(sinks=case.sink_logit[0, :, 0], num_key_value_groups=2, training=False)
    mask = torch.zeros(case.visible.shape).masked_fill(~seen(case), -math.inf)
    wanted, _ = eager_attention_forward(host, case.q, case.k, case.v, mask.double(), case.scale)
    close(run(case, form), wanted.transpose(1, 2), 1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_half_precision(form):
    case = make(dtype=torch.bfloat16, group=2, sink="per head", head_dim=48, value_dim=48, query=33)
    # One rounding of a bfloat16 is 2^-9; scores of up to 25 are rounded by neither form.
    close(run(case, form).float(), case.expected[1], 2e-2, relative=2e-2)
    out = run(case, form)
    assert out.dtype == torch.bfloat16


def test_the_column_rounds_the_logit_once():
    # 1 / scale is no bfloat16 number: in one channel it would be off by 0.4 %, and 100 by 0.3.
    q, k, v = torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 8), torch.ones(1, 1, 1, 8)
    k[...] = q[...] = math.sqrt(96.0 / 8 / 0.61)
    half = [tensor.bfloat16() for tensor in (q, k, v)]
    score = 0.61 * float((half[0].double() * half[1].double()).sum())
    out = sink_attention(*half, torch.tensor([96.0]), scale=0.61, form="column")
    assert out[0, 0, 0, 0].item() == pytest.approx(1 / (1 + math.exp(96 - score)), rel=1e-2)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation made."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.count = max(self.count, tensor.untyped_storage().nbytes() // 4)
        return result


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_no_map_is_made(form, causal):
    q, k, v = (torch.randn(1, 1, 509, 8, requires_grad=True) for _ in range(3))
    sink = torch.zeros(1, requires_grad=True)
    with Largest() as largest:
        sink_attention(q, k, v, sink, is_causal=causal, form=form).sum().backward()
    assert 0 < largest.count < 509 * 509 / 10
    with Largest() as largest:
        attention(q, k, v, scale=1.0, sink_logit=sink[None, :, None]).out.sum().backward()
    assert largest.count >= 509 * 509


@pytest.mark.parametrize("form", FORMS)
def test_second_derivatives_are_refused(form):
    q, k, v = (torch.randn(1, 1, 5, 8, requires_grad=True) for _ in range(3))
    out = sink_attention(q, k, v, torch.zeros(1), form=form)
    with pytest.raises(RuntimeError, match=r"no second derivatives|not implemented"):
        (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        grad.sum().backward()


def test_dropout_takes_the_column():
    case = make(sink=0.0, query=40, **WIDE)
    ones = torch.ones_like(case.v)
    torch.manual_seed(0)
    out = sink_attention(case.q, case.k, ones, case.sink_logit[0, :, 0], dropout_p=0.5)
    whole = sink_attention(case.q, case.k, ones, case.sink_logit[0, :, 0])
    assert (out - whole).abs().max() > 0.1
    assert out.mean().item() == pytest.approx(whole.mean().item(), rel=0.1)


def test_a_mask_that_is_learned_gets_its_gradient():
    case = make(sink=0.0, query=5, additive="alibi", **WIDE)
    bias = case.mask.additive.requires_grad_()
    sink = case.sink_logit[0, :, 0]
    assert torch.autograd.gradcheck(
        lambda bias: sink_attention(case.q, case.k, case.v, sink, attn_mask=bias), bias
    )


def test_no_keys_at_all():
    q, none = torch.randn(2, 3, 5, 7), torch.randn(2, 3, 0, 7)
    assert (sink_attention(q, none, none, torch.zeros(3)) == 0).all()


def test_values_of_another_width():
    case = make(sink="per head", head_dim=7, value_dim=5)
    close(run(case, "auto"), case.expected[1], 1e-12)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"v": torch.randn(1, 2, 5, 3)}, "values as wide as keys, and v has 3 channels, k 4"),
        ({"dropout_p": 0.1}, "no dropout, and dropout_p=0.1"),
        ({"attn_mask": torch.zeros(1, 1, 5, 5, requires_grad=True)}, "no gradient for attn_mask"),
        ({name: torch.randn(1, 2, 0, 4) for name in "kv"}, "at least one query and one key"),
        ({name: torch.randn(1, 2, 5, 4, device="meta") for name in "qkv"}, "only on a CPU.*meta"),
        (
            {name: torch.randn(1, 2, 5, 4).to(torch.float8_e5m2) for name in "qkv"},
            "not support torch.float8_e5m2",
        ),
    ],
)
def test_the_kernel_refuses_what_it_cannot_do(change, reason):
    given = {name: torch.randn(1, 2, 5, 4) for name in "qkv"} | change
    with pytest.raises(InputError, match=f"form='rescale' .*{reason}.*use form='column'"):
        sink_attention(**given, sink=torch.zeros(2), form="rescale")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"k": torch.randn(1, 2, 6, 4)}, r"\(1, 2, 6, 4\).*must be .*fit each other"),
        ({"q": torch.randn(3, 2, 5, 4)}, "fit each other"),
        ({"q": torch.randn(1, 2, 5, 3)}, "fit each other"),
        ({"q": torch.randn(2, 5, 4)}, "fit each other"),
        ({"attn_mask": torch.zeros(5, 5)}, r"attn_mask \(5, 5\) must broadcast to \(1, 2, 5, 5\)"),
        ({"attn_mask": torch.zeros(1, 1, 5, 4)}, "must broadcast to"),
        ({"attn_mask": torch.ones(1, 1, 5, 5).long()}, "must be bool or floating, not torch.int64"),
        ({"q": torch.randn(1, 3, 5, 4)}, "3 heads of q must be a multiple of the 2 heads"),
        ({"sink": torch.zeros(1)}, r"sink \(1,\) must be \(2,\), one logit per head"),
        ({"dropout_p": 1.0}, "dropout_p=1.0 must be at least 0 and below 1"),
        (
            {"is_causal": True, "attn_mask": torch.ones(1, 1, 5, 5, dtype=torch.bool)},
            "is_causal=True with an attn_mask",
        ),
        ({"is_causal": True, "q": torch.randn(1, 2, 1, 4)}, "as many keys as queries, not 5 and 1"),
        ({"form": "flash"}, "form='flash' must be one of auto, column, rescale"),
        ({"form": "column", "scale": 0.0}, "scale=0 leaves no score"),
    ],
)
def test_unusable_arguments_are_named(change, message):
    given = {name: torch.randn(1, 2, 5, 4) for name in "qkv"} | {"sink": torch.zeros(2)} | change
    with pytest.raises(Exception, match=message):
        # Without its own checks of types and shapes, as it runs for users.
        sink_attention.__wrapped__(**given)


def test_the_module_starts_as_softmax_one_and_learns():
    module = SinkLogitAttention(6)
    case = make(group=2, sink=0.0, dtype=torch.float32, causal=True, **WIDE)
    out = module(case.q, case.k, case.v, is_causal=True, scale=case.scale)
    close(out, case.expected[1], case.tolerance)
    out.square().sum().backward()
    assert module.logit.grad.shape == (6,) and (module.logit.grad != 0).all()
    assert list(module.state_dict()) == ["logit"]
    assert (SinkLogitAttention(3, init=-20.0).logit == -20).all()


@pytest.mark.parametrize("form", FORMS)
def test_capture_sees_the_keys_and_the_sink_apart(form):
    class Layer(torch.nn.Module):
        def forward(self, x):
            return sink_attention(x, x, x, sink, is_causal=True, form=form)

    layer, sink, seen = Layer(), torch.tensor([0.5, -1.0, 2.0]), []
    with capture(layer, lambda record: seen.append((record.k.shape, record.sink_logit))):
        layer(torch.randn(2, 3, 7, 5))
    ((shape, logit),) = seen
    assert shape == (2, 3, 7, 5) and torch.equal(logit[0, :, 0], sink)


def test_unusable_modules_are_named():
    with pytest.raises(InputError, match="num_heads=0 must be at least 1"):
        SinkLogitAttention(0)
    for init in (-math.inf, math.inf, math.nan):
        with pytest.raises(InputError, match=f"init={init} must be finite"):
            SinkLogitAttention(2, init=init)
    with pytest.raises(InputError, match=r"init=-100000.0 must be finite in torch.float16"):
        SinkLogitAttention(2, init=-1e5, dtype=torch.float16)
    assert SinkLogitAttention(2, init=-1e5, dtype=torch.bfloat16).logit.isfinite().all()


@pytest.mark.parametrize("form", FORMS)
def test_autocast_casts_what_f_scaled_dot_product_attention_casts(form):
    q, k, v = torch.randn(3, 2, 3, 5, 8)
    half = [t.to(torch.bfloat16) for t in (q, k, v)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = sink_attention(q, k, half[2], torch.zeros(3), form=form)
        exact = sink_attention(*(t.double() for t in (q, k, v)), torch.zeros(3), form=form)
    assert mixed.dtype == F.scaled_dot_product_attention(*half).dtype
    assert torch.equal(mixed, sink_attention(*half, torch.zeros(3), form=form))
    assert exact.dtype == torch.float64
