"""The score trace: what each operation between product and softmax does to the traced scores."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sinkwise.interception import matmul
from sinkwise.interception.score_trace import ScoreTrace
from sinkwise.interception.scores import Scores, Weights

B, H, Q, K, D = 2, 3, 5, 7, 11


class Tracing(TorchFunctionMode):
    """Traces scores as capture does, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.trace = ScoreTrace()
        self.tags = self.trace.tags

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        product = matmul.product(name, args, kwargs)
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        if product is None:
            self.trace.follow(name, args, kwargs, result)
        else:
            self.tags[result] = Scores(
                product.left, product.right.mT, scale=product.alpha, bias=product.bias
            )
        return result


def tensors() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(B, H, Q, D).double(), torch.randn(B, H, K, D).double()


def expressed(tag: Scores) -> Tensor:
    """The scores that a tag describes."""
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
    "transposed twice": lambda s: s.transpose(-1, -2).mul(0.3).transpose(2, 3),
    "there and back": lambda s: s.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "clamped far away": lambda s: s.clamp(min=-1e9, max=1e9),
    "kept finite": lambda s: torch.max(s, torch.tensor(torch.finfo(torch.float64).min)),
    "subtracted": lambda s: s.subtract(BIAS).subtract_(BIAS),
    "copied": lambda s: s.clone().contiguous().to(torch.float64).detach(),
}


@pytest.mark.parametrize("way", FAITHFUL)
def test_a_tag_describes_the_scores(way: str) -> None:
    q, k = tensors()
    with Tracing() as mode:
        scores = FAITHFUL[way](q @ k.mT)
        weights = scores.softmax(dim=-1)
    tag = mode.tags.get(weights)
    assert isinstance(tag, Weights) and tag.scores.faithful and tag.lead == (B, H)
    described = expressed(tag.scores).reshape(weights.shape).softmax(dim=-1)
    torch.testing.assert_close(described, weights, rtol=1e-6, atol=1e-9)


UNFAITHFUL: dict[str, Callable[[Tensor], Tensor]] = {
    "rounded": lambda s: s.div(0.3, rounding_mode="floor"),
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
def test_what_no_field_can_express_is_marked_unfaithful(way: str) -> None:
    q, k = tensors()
    with Tracing() as mode:
        weights = UNFAITHFUL[way](q @ k.mT).softmax(dim=-1)
    tag = mode.tags.get(weights)
    assert isinstance(tag, Weights) and not tag.scores.faithful


LOST: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax over heads": lambda s: s.softmax(dim=1),
    "zeros like it": lambda s: torch.zeros_like(s).softmax(dim=-1),
    "summed": lambda s: s.sum(dim=-1, keepdim=True).expand(B, H, Q, K).softmax(dim=-1),
    "pooled": lambda s: s.mean(dim=1).softmax(dim=-1),
}


@pytest.mark.parametrize("way", LOST)
def test_what_is_not_attention_loses_its_tag(way: str) -> None:
    q, k = tensors()
    with Tracing() as mode:
        result = LOST[way](q @ k.mT)
    assert mode.tags.get(result) is None


def test_a_sink_column() -> None:
    q, k = tensors()
    sink = torch.randn(H).double()
    with Tracing() as mode:
        scores = q @ k.mT * 0.3
        column = sink.reshape(1, H, 1, 1).expand(B, H, Q, 1)
        weights = torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
    tag = mode.tags.get(weights)
    assert isinstance(tag, Weights) and tag.scores.sink is not None
    assert torch.equal(tag.scores.sink, column[..., 0])


def test_scores_normalised_over_rows_are_transposed() -> None:
    q, k = tensors()
    with Tracing() as mode:
        weights = ((k @ q.mT) * 0.3 + BIAS.mT).softmax(dim=-2)
    tag = mode.tags.get(weights)
    assert isinstance(tag, Weights) and tag.has_layout(None, key_first=True)
    assert not tag.has_layout(None, key_first=False) and tag.lead == (B, H)
    torch.testing.assert_close(expressed(tag.scores).softmax(dim=-1), weights.mT)


def test_dropout_is_noted() -> None:
    q, k = tensors()
    with Tracing() as mode:
        weights = (q @ k.mT).softmax(dim=-1)
        same = torch.nn.functional.dropout(weights, 0.5, training=False)
        dropped = torch.nn.functional.dropout(weights, 0.5, training=True)
        changed = weights * 2.0
    tags = [mode.tags.get(tensor) for tensor in (same, dropped, changed)]
    assert [tag.dropped for tag in tags] == [False, True, False]
    assert [tag.faithful for tag in tags] == [True, True, False]


@pytest.mark.parametrize("name", ["expand", "expand_as"])
def test_a_bias_is_expanded_with_its_scores(name: str) -> None:
    q, k = (tensor[:1] for tensor in tensors())
    to = (B, H, Q, K) if name == "expand" else (torch.empty(B, H, Q, K),)
    with Tracing() as mode:
        weights = getattr(q @ k.mT + BIAS, name)(*to).softmax(dim=-1)
    tag = mode.tags.get(weights)
    assert isinstance(tag, Weights) and tag.scores.faithful and tag.scores.bias is not None
    assert tag.scores.bias.shape == weights.shape
    torch.testing.assert_close(expressed(tag.scores).softmax(dim=-1), weights)
