"""The three softmax types against closed forms, float64 loops and each other."""

import math

import pytest
import torch

from sinkwise.errors import InputError
from sinkwise.nn.softmax import SoftmaxOne, softmax, softmax_one
from tests.oracles.attention import attention as oracle
from tests.oracles.cases import close, make

KINDS = ("vanilla", "off-by-one", "learnable")
LOGITS = torch.tensor([-1e4, 0.7, 100.0], dtype=torch.float64)


def learned(kind):
    return {"sink": LOGITS} if kind == "learnable" else {}


def of_heads(kind):
    """The logit of each of three heads."""
    fixed = {"vanilla": -math.inf, "off-by-one": 0.0}
    return LOGITS if kind == "learnable" else torch.full((3,), fixed[kind], dtype=torch.float64)


def scores(**options):
    """A case, and its scores with -inf where masked."""
    case = make(**options)
    found = case.q @ case.k.mT * case.scale
    return case, found.masked_fill(~torch.from_numpy(case.visible), -math.inf)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("allowed", ["none", "head", "blank"])
def test_the_oracle(kind, allowed):
    case, found = scores(allowed=allowed)
    sink = of_heads(kind)[None, :, None]
    options = {"scale": case.scale, "softcap": None, "mask": case.mask, "sink_logit": sink}
    weights, _, _ = oracle(case.q, case.k, case.v, **options)
    close(softmax(found, kind, **learned(kind)), weights, 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_rows_without_keys(kind):
    x = torch.randn(1, 3, 2, 4, dtype=torch.float64)
    x[:, :, 1] = -math.inf
    x.requires_grad_()
    out = softmax(x, kind, **learned(kind))
    assert (out[:, :, 1] == 0).all()
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    assert torch.isfinite(grad).all() and (grad[:, :, 1] == 0).all()
    inputs = [torch.randn(1, 3, 2, 4, dtype=torch.float64, requires_grad=True)]
    inputs += [LOGITS.clone().requires_grad_()] if kind == "learnable" else []
    assert torch.autograd.gradcheck(lambda x, *sink: softmax(x, kind, *sink), inputs)


def test_vanilla_is_torchs():
    _, x = scores()
    close(softmax(x), torch.softmax(x, -1), 1e-14)


def test_a_sink_at_minus_infinity_is_vanilla():
    _, x = scores(allowed="blank")
    sink = torch.full((3,), -math.inf, dtype=torch.float64)
    assert torch.equal(softmax(x, "learnable", sink), softmax(x))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_one_more_score_of_zero(dim):
    x = torch.randn(3, 5, 7, dtype=torch.float64)
    zero = torch.zeros_like(x.narrow(dim, 0, 1))
    wanted = torch.softmax(torch.cat([x, zero], dim), dim).narrow(dim, 0, x.shape[dim])
    close(softmax_one(x, dim), wanted, 1e-15)
    assert torch.equal(SoftmaxOne(dim)(x), softmax_one(x, dim))


def test_closed_forms():
    assert softmax_one(torch.zeros(7)).tolist() == pytest.approx([1 / 8] * 7)
    assert softmax_one(torch.tensor([math.log(3.0)])).item() == pytest.approx(3 / 4)
    assert softmax_one(torch.tensor([-math.inf, -math.inf])).tolist() == [0, 0]
    assert softmax_one(torch.empty(2, 0)).shape == (2, 0)


@pytest.mark.parametrize("top", [1e4, -1e4, 3e38])
def test_stable(top):
    out = softmax_one(torch.tensor([top, top], dtype=torch.float32))
    assert out.tolist() == ([0.5, 0.5] if top > 0 else [0, 0])


def test_a_high_logit_has_a_finite_gradient():
    x = torch.full((1, 1, 2, 4), -50.0, requires_grad=True)
    sink = torch.tensor([100.0], requires_grad=True)
    softmax(x, "learnable", sink).sum().backward()
    assert torch.isfinite(sink.grad).all() and torch.isfinite(x.grad).all()


def test_half_precision_is_computed_in_float32():
    x = 3 * torch.randn(5000).bfloat16()
    assert torch.equal(softmax_one(x), softmax_one(x.float()).bfloat16())


def test_unusable_kinds_are_named():
    x = torch.zeros(1, 3, 2, 2)
    with pytest.raises(InputError, match=r"sink None must be \(3,\), one logit per head"):
        softmax(x, "learnable")
    with pytest.raises(InputError, match=r"sink \(2,\) must be \(3,\), one logit per head"):
        softmax.__wrapped__(x, "learnable", torch.zeros(2))
    with pytest.raises(InputError, match="kind='off-by-one' has no learned logit"):
        softmax(x, "off-by-one", torch.zeros(3))
    with pytest.raises(InputError, match="kind='plain' must be one of vanilla, off-by-one, learn"):
        softmax.__wrapped__(x, "plain")
