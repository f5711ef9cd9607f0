"""Provenance: what each operation between product and softmax does to the scores' tag."""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sinkwise.interception import matmul
from sinkwise.interception.score_trace import Scores, Tags, Weights, follow

B, H, Q, K, D = 2, 3, 5, 7, 11


class Following(TorchFunctionMode):
    """Tags as capture does, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.tags = Tags()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        product = matmul.product(name, args, kwargs)
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        if product is not None:
            tag: Scores | Weights | None = Scores(
                product.left, product.right.mT, scale=product.alpha, bias=product.bias
            )
        else:
            tag = follow(self.tags, name, args, kwargs, result)
        if tag is not None:
            self.tags[result] = tag
        return result


def tensors() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(B, H, Q, D).double(), torch.randn(B, H, K, D).double()


def said(tag: Scores) -> Tensor:
    """The scores as a tag tells them."""
    scores = torch.einsum("...qd,...kd->...qk", tag.q, tag.k) * tag.scale
    if tag.softcap is not None:
        scores = tag.softcap * torch.tanh(scores / tag.softcap)
    return scores if tag.bias is None else scores + tag.bias


MASK = torch.rand(B, 1, Q, K) > 0.4
BIAS = torch.randn(H, Q, K).double()
ROWS = torch.rand(H, 1, 1).double() + 0.5

FAITHFUL: dict[str, Callable[[Tensor], Tensor]] = {
    "times": lambda s: s * 0.3,
    "number first": lambda s: 0.3 * s,
    "in place": lambda s: s.mul_(0.3).add_(BIAS),
    "divided": lambda s: s / 3.0,
    "divided by a tensor": lambda s: s / torch.tensor(11.0).sqrt(),
    "bias": lambda s: s + BIAS,
    "bias first": lambda s: BIAS + s,
    "bias, alpha": lambda s: torch.add(s, BIAS, alpha=2),
    "minus": lambda s: s - BIAS,
    "bias, then scaled": lambda s: (s + BIAS) * 0.5,
    "two biases": lambda s: s + BIAS + BIAS[0],
    "head factors": lambda s: s * ROWS,
    "head factors after a bias": lambda s: (s + BIAS) / ROWS,
    "query factors": lambda s: s * torch.linspace(0.5, 1, Q)[:, None].double(),
    "filled": lambda s: s.masked_fill(~MASK, -1e30),
    "filled in place": lambda s: s.masked_fill_(~MASK, float("-inf")),
    "where": lambda s: torch.where(MASK, s, torch.tensor(-1e30).double()),
    "method where": lambda s: s.where(MASK, torch.tensor(-1e30).double()),
    "softcap": lambda s: 5.0 * torch.tanh(s * 0.3 / 5.0),
    "softcap, then bias": lambda s: torch.tanh(s / 5.0) * 5.0 + BIAS,
    "views": lambda s: (s.view(B * H, Q, K) * 0.3).view(B, H, Q, K),
    "bias, views": lambda s: (s + BIAS).reshape(B * H, Q, K).unflatten(0, (B, H)),
    "turned twice": lambda s: s.transpose(-1, -2).mul(0.3).transpose(2, 3),
    "there and back": lambda s: s.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "clamped far away": lambda s: s.clamp(min=-1e9, max=1e9),
    "kept finite": lambda s: torch.max(s, torch.tensor(torch.finfo(torch.float64).min)),
    "copied": lambda s: s.clone().contiguous().to(torch.float64).detach(),
}


@pytest.mark.parametrize("way", FAITHFUL)
def test_a_tag_tells_the_scores(way: str) -> None:
    q, k = tensors()
    with Following() as mode:
        scores = FAITHFUL[way](q @ k.mT)
        weights = scores.softmax(dim=-1)
    tag = mode.tags[weights]
    assert isinstance(tag, Weights) and tag.scores.faithful and tag.lead == (B, H)
    told = said(tag.scores).reshape(weights.shape).softmax(dim=-1)
    torch.testing.assert_close(told, weights, rtol=1e-6, atol=1e-9)


UNFAITHFUL: dict[str, Callable[[Tensor], Tensor]] = {
    "squared": lambda s: s**2,
    "relu": torch.relu,
    "key factors": lambda s: s * torch.rand(K).double(),
    "clamped near": lambda s: s.clamp(min=-1.0),
    "filled with a real score": lambda s: s.masked_fill(~MASK, 0.0),
    "heads mixed": lambda s: torch.nn.functional.linear(
        s.permute(0, 2, 3, 1), torch.rand(H, H).double()
    ).permute(0, 3, 1, 2),
    "capped after a bias": lambda s: torch.tanh(s + BIAS),
    "factors after the cap": lambda s: torch.tanh(s) * ROWS,
}


@pytest.mark.parametrize("way", UNFAITHFUL)
def test_what_no_field_can_say_is_marked(way: str) -> None:
    q, k = tensors()
    with Following() as mode:
        weights = UNFAITHFUL[way](q @ k.mT).softmax(dim=-1)
    tag = mode.tags[weights]
    assert isinstance(tag, Weights) and not tag.scores.faithful


LOST: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax over heads": lambda s: s.softmax(dim=1),
    "zeros like it": lambda s: torch.zeros_like(s).softmax(dim=-1),
    "summed": lambda s: s.sum(dim=-1, keepdim=True).expand(B, H, Q, K).softmax(dim=-1),
    "pooled": lambda s: s.mean(dim=1).softmax(dim=-1),
}


@pytest.mark.parametrize("way", LOST)
def test_what_is_no_attention_is_let_go(way: str) -> None:
    q, k = tensors()
    with Following() as mode:
        result = LOST[way](q @ k.mT)
    tag = mode.tags[result]
    assert not isinstance(tag, Weights) or way == "pooled"


def test_a_sink_column() -> None:
    q, k = tensors()
    sink = torch.randn(H).double()
    with Following() as mode:
        scores = q @ k.mT * 0.3
        column = sink.reshape(1, H, 1, 1).expand(B, H, Q, 1)
        weights = torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
    tag = mode.tags[weights]
    assert isinstance(tag, Weights) and tag.scores.sink is not None
    assert torch.equal(tag.scores.sink, column[..., 0])


def test_scores_normalised_over_rows_are_turned() -> None:
    q, k = tensors()
    with Following() as mode:
        weights = ((k @ q.mT) * 0.3 + BIAS.mT).softmax(dim=-2)
    tag = mode.tags[weights]
    assert isinstance(tag, Weights) and tag.laid_out(None, turned=True)
    assert not tag.laid_out(None, turned=False) and tag.lead == (B, H)
    torch.testing.assert_close(said(tag.scores).softmax(dim=-1), weights.mT)


def test_dropout_is_noted() -> None:
    q, k = tensors()
    with Following() as mode:
        weights = (q @ k.mT).softmax(dim=-1)
        same = torch.nn.functional.dropout(weights, 0.5, training=False)
        dropped = torch.nn.functional.dropout(weights, 0.5, training=True)
        changed = weights * 2.0
    assert not mode.tags[same].dropped and mode.tags[dropped].dropped
    assert mode.tags[same].faithful and not mode.tags[changed].faithful


def test_a_tag_goes_with_its_tensor() -> None:
    tags = Tags()
    gc.disable()
    try:
        tensor = torch.randn(3)
        tags[tensor] = Scores(torch.randn(1, 1), torch.randn(1, 1))
        assert tags[tensor] is not None and tags[torch.randn(3)] is None and tags["x"] is None
        del tensor
        assert not tags._tags
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bhqd,bhkd->bhqk", ((2, 3, 5, 11), (2, 3, 7, 11))),
        ("bqhd,bkhd->bhqk", ((2, 5, 3, 11), (2, 7, 3, 11))),
        ("b q h d, b k h d -> b q k h", ((2, 5, 3, 11), (2, 7, 3, 11))),
        ("id,jd->ij", ((5, 11), (7, 11))),
        ("id,jd->ji", ((5, 11), (7, 11))),
    ],
)
def test_an_einsum_is_a_product(equation: str, shapes: tuple) -> None:
    operands = [torch.randn(shape) for shape in shapes]
    product = matmul.product("einsum", (equation, *operands), {})
    assert product is not None
    result = product.laid_out(torch.einsum(equation, *operands))
    torch.testing.assert_close(product.left @ product.right, result)
    listed = matmul.product("einsum", (equation, operands), {})
    assert listed is not None and torch.equal(listed.left, product.left)


@pytest.mark.parametrize("equation", ["bd,bd->b", "ij->ji", "ab,bc,cd->ad", "...ij,...kj->...ik",
                                      "ijk,jkl->il"])  # fmt: skip
def test_other_einsums_are_not(equation: str) -> None:
    count = equation.count(",") + 1
    dims = [len(term.replace("...", "")) for term in equation.split("->")[0].split(",")]
    operands = [torch.randn([2] * dims[i]) for i in range(count)]
    assert matmul.product("einsum", (equation, *operands), {}) is None


def test_vectors_and_other_functions_are_no_products() -> None:
    vector, matrix = torch.randn(5), torch.randn(5, 5)
    assert matmul.product("matmul", (matrix, vector), {}) is None
    assert matmul.product("add", (matrix, matrix), {}) is None
    product = matmul.product("matmul", (matrix,), {"other": matrix})
    assert product is not None and product.left is matrix
