"""Sink logits: each way to apply one is captured correctly; one that a kernel drops is an error."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

import sinkwise as sw
from sinkwise.attention.column import columns
from sinkwise.attention.received import received_mass, row_lse
from sinkwise.attention.reference import attention
from sinkwise.capturing.capture import capture
from sinkwise.core.layout import code
from sinkwise.core.records import AttentionMask, AttentionRecord
from sinkwise.diagnosis.rules import Rules
from sinkwise.errors import CaptureError
from sinkwise.measure.call import CallMeter
from sinkwise.measure.call_tokens import CallTokens
from tests.models import build, run
from tests.models.sink_models import FOLDERS

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*flex_attention called without torch.compile:UserWarning", "ignore::FutureWarning"
)
SCORES = (0.1, -0.2, 0.0, 0.2, -0.1, 0.0)
SINKS = (-1e4, -math.inf, 0.0, 3.0, 100.0)


def values() -> Tensor:
    """The six values of the published example."""
    torch.manual_seed(0)
    return torch.randn(6, 4)


class Six(nn.Module):
    """One head, two queries with the published scores; the second may have all keys masked."""

    def __init__(self, way: str, sink: float, empty: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.way, self.sink = way, nn.Parameter(torch.tensor([sink], dtype=dtype))
        self.q = torch.ones(1, 1, 2, 1, dtype=dtype)
        self.k = torch.tensor(SCORES, dtype=dtype)[None, None, :, None]
        self.seen = torch.ones(1, 1, 2, 6, dtype=torch.bool)
        self.seen[:, :, 1] = not empty

    def forward(self, v: Tensor) -> Tensor:
        sink = self.sink[None, :, None]
        if self.way.startswith("flex"):
            return self.flexible(v, sink)
        scores = (self.q @ self.k.mT).masked_fill(~self.seen, -torch.inf)
        if self.way == "column":
            both = torch.cat([scores, sink[..., None].expand(1, 1, 2, 1)], dim=-1)
            return both.softmax(dim=-1)[..., :-1] @ v
        lse = scores.logsumexp(dim=-1)
        if self.way == "sigmoid":
            share = torch.sigmoid(lse - sink)
        else:
            share = torch.exp(lse - torch.logaddexp(lse, sink))
        return scores.softmax(dim=-1).nan_to_num(0.0) @ v * share.unsqueeze(-1)

    def flexible(self, v: Tensor, sink: Tensor) -> Tensor:
        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return torch.where(self.seen[0, 0, i, j], s, -torch.inf)

        out, aux = flex_attention(
            self.q, self.k, v, score_mod=score, scale=1.0, return_aux=AuxRequest(lse=True)
        )
        lse = aux.lse.to(v.dtype)
        if self.way == "flex sigmoid":
            return out * torch.sigmoid(lse - sink)[..., None]
        lse = lse.unsqueeze(-1)
        both = torch.cat([lse, sink[..., None].expand(1, 1, 2, 1)], dim=-1)
        return out * torch.exp(lse - torch.logsumexp(both, dim=-1, keepdim=True))


WAYS = ("column", "sigmoid", "logaddexp", "flex sigmoid", "flex cat")


def right(sink: float, empty: bool) -> tuple[Tensor, Tensor]:
    """(map [query key], log-sum-exp [query]) by the formula, one number at a time."""
    rows, sums = [], []
    for sees in (True, not empty):
        scores = SCORES if sees else ()
        top = max([*scores, sink, -1e300])
        total = math.exp(sink - top) + sum(math.exp(s - top) for s in scores)
        rows.append([math.exp(s - top) / total for s in scores] or [0.0] * 6)
        sums.append(top + math.log(total) if total else -math.inf)
    return torch.tensor(rows, dtype=torch.float64), torch.tensor(sums, dtype=torch.float64)


def records_of(model: nn.Module, inputs: Any) -> tuple[Any, list[AttentionRecord]]:
    kept: list[AttentionRecord] = []
    with torch.no_grad(), capture(model, kept.append):
        out = run(model, inputs)
    return out, kept


@pytest.mark.parametrize("empty", [False, True], ids=["", "a query without keys"])
@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("way", WAYS)
def test_the_record_of_every_way(way: str, sink: float, empty: bool) -> None:
    model = Six(way, sink, empty, torch.float64)
    v = values().double()[None, None]
    out, (record,) = records_of(model, (v,))
    weights, lse = right(sink, empty)
    assert record.faithful and record.sink_logit is not None
    assert torch.equal(record.sink_logit.double(), torch.full((1, 1, 2), sink).double())
    ours = attention(
        record.q, record.k, record.v, scale=record.scale, mask=record.mask,
        sink_logit=record.sink_logit.double(),
    )  # fmt: skip
    torch.testing.assert_close(ours.weights[0, 0], weights, rtol=0, atol=1e-12)
    torch.testing.assert_close(ours.out[0, 0], weights @ v[0, 0], rtol=0, atol=1e-12)
    torch.testing.assert_close(ours.lse[0, 0], lse, rtol=0, atol=1e-12)
    if record.lse is not None:
        torch.testing.assert_close(record.lse[0, 0].double(), lse, rtol=0, atol=1e-6)
    undefined = empty and sink == -math.inf  # 0 / 0 in the model's own arithmetic
    rows = slice(0, 1) if undefined else slice(0, 2)
    assert record.out is out or torch.equal(record.out[:, :, rows], out[:, :, rows])
    expected = (weights @ v[0, 0])[rows]
    torch.testing.assert_close(record.out[0, 0, rows], expected, rtol=0, atol=1e-6)
    if record.weights is not None:
        torch.testing.assert_close(record.weights[0, 0, rows], weights[rows], rtol=0, atol=1e-6)
    if not undefined:
        stats = CallMeter(Rules.named("auto")).measure(
            record, CallTokens(torch.full((1, 6), code("text")), final=True)
        )
        share = stats.by_kind[0, 0, code("text")]
        assert float(share) == pytest.approx(float(weights.sum(-1).mean()), abs=1e-6)
        assert float(stats.first[0, 0]) == pytest.approx(
            float(weights[:, 0].sum() / (1 if empty else 2)), abs=1e-6
        )


def test_both_forms_are_equal_in_float64() -> None:
    v = values().double()[None, None]
    for sink in (-1e4, 0.0, 3.0, 100.0):
        for empty in (False, True):
            outs = [
                records_of(Six(way, sink, empty, torch.float64), (v,))[1][0].out
                for way in ("column", "sigmoid", "logaddexp")
            ]
            for out in outs[1:]:
                torch.testing.assert_close(out, outs[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_the_published_example(way: str) -> None:
    """A sink logit of 3 takes 77 % of the attention, and the output shrinks from .83 to .19."""
    v = values()[None, None]
    _, (record,) = records_of(Six(way, 3.0, False, torch.float32), (v,))
    assert record.out[0, 0, 0].norm().item() == pytest.approx(0.19, abs=0.005)
    _, (plain,) = records_of(Six(way, -math.inf, False, torch.float32), (v,))
    assert plain.out[0, 0, 0].norm().item() == pytest.approx(0.83, abs=0.005)
    options = {"scale": record.scale, "mask": record.mask}
    for lse in (None, record.lse):
        for method in ("tiles", "flash"):
            mass = received_mass(
                record.q, record.k, sink_logit=record.sink_logit, lse=lse, method=method, **options
            ).mass
            assert 1 - float(mass.detach().sum()) / 2 == pytest.approx(0.77, abs=0.005)
    total = row_lse(record.q, record.k, sink_logit=record.sink_logit, **options)
    zero = torch.zeros(6, dtype=torch.int64)
    all_columns = columns(
        record.q, record.k, total, batch=zero, head=zero, key=torch.arange(6), **options
    )
    assert 1 - float(all_columns[:, 0].detach().sum()) == pytest.approx(0.77, abs=0.005)


@pytest.mark.parametrize("method", ["tiles", "flash"])
@pytest.mark.parametrize("sink", SINKS)
def test_received_attention_is_finite_for_any_sink(sink: float, method: str) -> None:
    weights, lse = right(sink, empty=True)
    model = Six("column", sink, True, torch.float32)
    result = received_mass(
        model.q, model.k, scale=1.0, mask=AttentionMask(allowed=model.seen), method=method,
        sink_logit=torch.full((1, 1, 1), sink),
    )  # fmt: skip
    torch.testing.assert_close(result.mass[0, 0].double(), weights.sum(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(result.lse[0, 0].double(), lse, rtol=1e-6, atol=1e-6)


class Wrong(Six):
    """Ways to change an attention by its log-sum-exp that no record can express."""

    def __init__(self, way: str) -> None:
        super().__init__(way, -math.inf, False, torch.float32)
        self.logit = nn.Parameter(torch.tensor([3.0]))  # an unsuspicious name

    def forward(self, v: Tensor) -> Tensor:
        scores = self.q @ self.k.mT
        if self.way == "transposed":
            share = torch.sigmoid(scores.logsumexp(dim=-1) - self.logit)
            out = (scores.softmax(dim=-1) @ v).transpose(1, 2)
            return out * share.transpose(1, 2)[..., None]
        if self.way == "late":
            out = scores.softmax(dim=-1) @ v
            return out * torch.sigmoid(scores.logsumexp(dim=-1) - self.logit)[..., None]
        out, aux = flex_attention(self.q, self.k, v, scale=1.0, return_aux=AuxRequest(lse=True))
        if self.way == "flex, twice the logit":
            return out * torch.sigmoid(torch.sub(aux.lse, self.logit, alpha=2.0))[..., None]
        return out * torch.exp(-aux.lse)[..., None]


@pytest.mark.parametrize("way", ["transposed", "late", "flex", "flex, twice the logit"])
def test_what_no_record_can_express_is_an_error(way: str) -> None:
    with pytest.raises(CaptureError, match=r"log-sum-exp.*set_attn_implementation\('eager'\)"):
        records_of(Wrong(way), (values()[None, None],))


class Losses(nn.Module):
    """Computes a log-sum-exp without changing the attention."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "flex":
            out, aux = flex_attention(x, x, x, return_aux=AuxRequest(lse=True))
            self.seen.append(aux.lse)
            return out.transpose(1, 2).flatten(2) + 1
        scores = x @ x.mT
        lse = scores.logsumexp(dim=-1)
        self.seen.append((lse**2).mean())
        out = scores.softmax(dim=-1) @ x
        if self.way == "in place":
            out += 1
        return out


@pytest.mark.parametrize("way", ["plain", "in place", "flex"])
def test_a_log_sum_exp_that_is_only_inspected_changes_nothing(way: str) -> None:
    x = torch.randn(2, 3, 7, 8)
    _, records = records_of(Losses(way), (x,))
    assert [record.sink_logit for record in records] == [None]


def set_to(name: str, kernel: str) -> tuple[nn.Module, Any]:
    """A small model of a family with sink logits, set to a kernel that its library rejects."""
    model, inputs = build(f"{name}-eager")
    model.config._attn_implementation_internal = kernel
    return model, inputs


def deaf(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any):
    """An attention function as users register them, which ignores its **kwargs."""
    group = query.shape[1] // key.shape[1]
    keys, values_ = (t.repeat_interleave(group, dim=1) for t in (key, value))
    scores = query @ keys.mT * kwargs["scaling"]
    if mask is not None:
        scores = scores + torch.where(mask, 0.0, -torch.inf) if mask.dtype == torch.bool else scores
    return (scores.softmax(dim=-1) @ values_).transpose(1, 2).contiguous(), None


@pytest.mark.parametrize("kernel", ["sdpa", "deaf"])
@pytest.mark.parametrize("name", FOLDERS)
def test_a_kernel_that_drops_the_sink_logit_is_refused(
    name: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    mask = transformers.masking_utils.sdpa_mask
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "deaf", deaf)
    monkeypatch.setitem(transformers.AttentionMaskInterface._global_mapping, "deaf", mask)
    model, inputs = set_to(name, kernel)
    place = r"layers\.\d\.self_attn \(layer \d\)"
    cure = r"set_attn_implementation\('eager'\)"
    message = rf"{place}: attn_implementation='{kernel}' drops the sink logit 'sink.*{cure}"
    with pytest.raises(CaptureError, match=message):
        records_of(model, inputs)
    with pytest.raises(CaptureError, match=message):
        with capture(model, lambda record: None, check=False), torch.no_grad():
            run(model, inputs)
    with pytest.raises(CaptureError, match=message):
        sw.scan(model, [inputs])
    model.config._attn_implementation_internal = "eager"
    assert any(record.sink_logit is not None for record in records_of(model, inputs)[1])


def test_every_family_with_a_sink_logit_in_transformers_is_among_the_models() -> None:
    transformers = pytest.importorskip("transformers")
    folder = Path(transformers.__file__).parent / "models"
    found = {
        path.parent.name
        for path in folder.glob("*/modeling_*.py")
        if re.search(r"\bs_aux\b|\bself\.sinks?\b|\bsinks=|sink_proj", path.read_text())
    }
    assert found == set(FOLDERS.values())


class Owner(nn.Module):
    """Attention by SDPA, which has no argument for the sink that the module owns or passes on."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        if way in ("owned", "minus infinity"):
            value = -math.inf if way == "minus infinity" else 0.0
            self.attention_sink_bias = nn.Parameter(torch.full((3,), value))
        if way == "a token":
            self.sink_token = nn.Parameter(torch.randn(1, 1, 24))
        if way == "projected":
            self.sink_proj = nn.Linear(24, 3)
        if way == "another layer":
            self.sink_norm = nn.LayerNorm(24)

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (3, 8)).transpose(1, 2)
        if self.way == "passed":
            return swallow(heads, s_aux=torch.zeros(3))
        if self.way == "computed":
            return swallow(heads, sinks=heads.mean(dim=-1, keepdim=True))
        if self.way == "none":
            return swallow(heads, s_aux=None)
        return swallow(heads)


def swallow(heads: Tensor, **kwargs: Any) -> Tensor:
    return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("way", ["owned", "projected", "passed", "computed"])
def test_a_dropped_sink_of_any_module_is_an_error(way: str) -> None:
    with pytest.raises(CaptureError, match=r"the model \(layer 0\).*sink logit"):
        records_of(Owner(way), (torch.randn(2, 5, 24),))


@pytest.mark.parametrize("way", ["minus infinity", "a token", "another layer", "none", "plain"])
def test_what_is_not_a_sink_logit_is_no_error(way: str) -> None:
    _, (record,) = records_of(Owner(way), (torch.randn(2, 5, 24),))
    assert record.sink_logit is None


def test_layers_without_a_sink_beside_layers_with_one() -> None:
    model, inputs = build("mimo-v2-flash-eager")
    found = [record.sink_logit is not None for record in records_of(model, inputs)[1]]
    assert found == [False, True]


@pytest.mark.parametrize("name", ["gpt-oss", "granite-swa"])
def test_the_sink_logit_is_the_model_s_own(name: str) -> None:
    model, inputs = build(f"{name}-eager")
    _, records = records_of(model, inputs)
    for record, layer in zip(records, model.layers, strict=True):
        wanted = layer.self_attn.sinks[None, :, None].expand(2, 6, 13)
        assert torch.equal(record.sink_logit, wanted)
        if record.weights is not None:
            left = 1 - record.weights.sum(dim=-1)
            assert float(left.min()) > 1e-3  # what the sink takes


@pytest.mark.parametrize("name", ["gpt-oss", "granite-swa"])
def test_training_with_padding_is_captured_and_undisturbed(name: str) -> None:
    def gradients(captured: bool) -> list[Tensor]:
        model, inputs = build(f"{name}-eager")
        model.train()
        kept: list[AttentionRecord] = []
        if captured:
            with capture(model, kept.append):
                model(**inputs).last_hidden_state.square().mean().backward()
            assert all(record.sink_logit is not None for record in kept)
        else:
            model(**inputs).last_hidden_state.square().mean().backward()
        return [layer.self_attn.sinks.grad for layer in model.layers]

    for ours, theirs in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(ours, theirs) and float(theirs.abs().max()) > 0
