"""FlexAttention: every mask and score function is in the record, or an error explains why not."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from sinkwise.capturing.capture import capture
from sinkwise.capturing.generation import Steps
from sinkwise.conformance import CHECKS, check_model
from sinkwise.core.records import AttentionRecord
from sinkwise.errors import CaptureError
from tests.capturing.test_capture import _state, check, recomputed
from tests.capturing.test_generation import GREEDY, equal, full, generator, prompt
from tests.models import build, run

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*flex_attention called without torch.compile:UserWarning",
    "ignore::FutureWarning",
    "ignore:_compile flag on create_block_mask:DeprecationWarning",
)
TOKENS = 13
ALIBI = torch.tensor([0.5, 0.25, 0.125, 0.0625])
TABLE = torch.linspace(-1, 1, 4 * TOKENS * TOKENS).reshape(4, TOKENS, TOKENS)
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 8, [0] * 9 + [1] * 4])


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def documents(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (DOCUMENTS[b, i] == DOCUMENTS[b, j]) & (i >= j)


def window_by_head(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) & (i - j < 2 + h)


MASKS = {"none": None, "causal": causal, "documents": documents, "by head": window_by_head}
SCORES: dict[str, Callable | None] = {
    "none": None,
    "identity": lambda s, b, h, i, j: s,
    "alibi": lambda s, b, h, i, j: s - ALIBI[h] * (i - j),
    "table": lambda s, b, h, i, j: s + TABLE[h, i, j],
    "hidden": lambda s, b, h, i, j: torch.where(i - j < 4, s, -torch.inf),
    "softcap": lambda s, b, h, i, j: 1.5 * torch.tanh(s / 1.5),
    "softcap, table": lambda s, b, h, i, j: 20 * torch.tanh(s / 20) + TABLE[h, i, j],
    "square": lambda s, b, h, i, j: s * s.abs(),
    "temperature": lambda s, b, h, i, j: s * ALIBI[h],
    "capped sum": lambda s, b, h, i, j: 2.0 * torch.tanh((s + TABLE[h, i, j]) / 2.0),
}
UNKNOWN = {"square", "temperature", "capped sum"}


UNCOMPILED = CHECKS[:-3]
"""The checks that do not run the model compiled, as it is, which takes long."""


class Flexible(nn.Module):
    """Attention with torch's FlexAttention, as users write it."""

    def __init__(self, mask: Callable | None, score: Callable | None, compiled: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(24, 32), nn.Linear(24, 16), nn.Linear(24, 16)
        self.block_mask = None
        if mask is not None:
            self.block_mask = create_block_mask(mask, 2, 4, TOKENS, TOKENS, device="cpu")
        self.score = score
        self.function = torch.compile(flex_attention) if compiled else flex_attention
        self.lse: Tensor | None = None

    def heads(self, x: Tensor) -> list[Tensor]:
        return [f(x).unflatten(-1, (-1, 8)).transpose(1, 2) for f in (self.q, self.k, self.v)]

    def forward(self, x: Tensor) -> Tensor:
        out, aux = self.function(
            *self.heads(x), block_mask=self.block_mask, score_mod=self.score, scale=0.9,
            enable_gqa=True, return_aux=AuxRequest(lse=True),
        )  # fmt: skip
        self.lse = aux.lse
        return out.transpose(1, 2).flatten(2)


def flexible(mask: str, score: str, compiled: bool = False) -> tuple[Flexible, Tensor]:
    torch.manual_seed(3)
    model = Flexible(MASKS[mask], SCORES[score], compiled)
    with torch.no_grad():
        model.q.weight.mul_(4.0)
    return model, torch.randn(2, TOKENS, 24)


def records_of(model: nn.Module, inputs: Any) -> tuple[list[Tensor], list[AttentionRecord]]:
    records: list[AttentionRecord] = []
    with torch.no_grad(), capture(model, records.append):
        out = run(model, inputs)
    return [out] if isinstance(out, Tensor) else list(out.values())[:1], records


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("mask", MASKS)
def test_masks_and_score_functions(mask: str, score: str, compiled: bool) -> None:
    model, x = flexible(mask, score, compiled)
    (captured,), (record,) = records_of(model, (x,))
    q, k, v = model.heads(x)
    places = [torch.arange(n).reshape([-1 if a == b else 1 for b in range(4)])
              for a, n in enumerate((2, 4, TOKENS, TOKENS))]  # fmt: skip
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT * 0.9
    if SCORES[score] is not None:
        scores = SCORES[score](scores, *places)
    if MASKS[mask] is not None:
        scores = scores.masked_fill(~MASKS[mask](*places), -torch.inf)
    weights = scores.softmax(-1)
    out = weights @ v.double().repeat_interleave(2, 1)
    torch.testing.assert_close(captured.double(), out.transpose(1, 2).flatten(2), rtol=0, atol=2e-6)
    assert record.k.shape[1] == 2 and record.group == 2
    assert record.faithful == (score not in UNKNOWN)
    assert (record.weights is None) == record.faithful
    assert (record.softcap is not None) == score.startswith("softcap")
    ours = recomputed(record)[2] if record.weights is None else record.weights.double()
    torch.testing.assert_close(ours, weights, rtol=0, atol=1e-5)
    assert record.lse is not None and model.lse is not None
    torch.testing.assert_close(record.lse.double(), scores.logsumexp(-1), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(record.lse, model.lse)
    if record.faithful:
        check(record)


def test_a_mask_is_kept_once_where_samples_and_heads_share_it() -> None:
    shapes = {"causal": (1, 1), "documents": (2, 1), "by head": (1, 4)}
    for mask, lead in shapes.items():
        _, (record,) = records_of(flexible(mask, "none")[0], (torch.randn(2, TOKENS, 24),))
        allowed = record.mask.allowed
        assert record.mask.causal if allowed is None else allowed.shape[:2] == lead


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype: torch.dtype) -> None:
    model, x = flexible("causal", "softcap")
    _, (record,) = records_of(model.to(dtype), (x.to(dtype),))
    assert record.softcap == pytest.approx(1.5) and record.faithful
    check(record, tolerance=2e-2)


FAMILIES = {
    "llama": {}, "llama-left": {}, "mistral": {}, "qwen3-sliding": {}, "gemma-3": {}, "vit": {},
    "bert": {}, "olmo2": {}, "opt": {}, "whisper": {}, "dinov2": {},
    "llama-4-heads": {"num_attention_heads": 4, "num_key_value_heads": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_models_conform(name: str) -> None:
    model, inputs = build(name.removesuffix("-4-heads") + "-sdpa")
    if FAMILIES[name]:
        torch.manual_seed(0)
        config = type(model.config)(**{**model.config.to_dict(), **FAMILIES[name]})
        model = type(model)(config).eval()
        model.set_attn_implementation("sdpa")
    expected = records_of(model, inputs)
    model.set_attn_implementation("flex_attention")
    before = _state(model)
    captured = records_of(model, inputs)
    assert _state(model) == before
    assert len(captured[1]) == len(expected[1])
    for ours, theirs in zip(captured[1], expected[1], strict=True):
        assert (ours.layer, ours.name, ours.k.shape) == (theirs.layer, theirs.name, theirs.k.shape)
        weights, others, sees = recomputed(ours)[2], recomputed(theirs)[2], recomputed(theirs)[3]
        torch.testing.assert_close(weights[sees], others[sees], rtol=0, atol=1e-5)
    for result in check_model(model, inputs, checks=UNCOMPILED):
        assert result.status == "passed" or result.check == "causality"


def test_gemma_2_caps_its_scores() -> None:
    model, inputs = build("gemma-2-eager")
    _, eager = records_of(model, inputs)
    model.set_attn_implementation("flex_attention")
    _, flex = records_of(model, inputs)
    for one, other in zip(flex, eager, strict=True):
        assert one.faithful and one.softcap == other.softcap == 3.0
        torch.testing.assert_close(recomputed(one)[2], recomputed(other)[2], rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["llama", "gemma-2"])
def test_generation_with_a_cache(name: str) -> None:
    model = generator(f"{name}-eager")
    model.set_attn_implementation("flex_attention")
    steps = Steps()
    with capture(model, steps.add):
        tokens = model.generate(**prompt(3), **GREEDY)
    real = torch.cat([prompt(3)["attention_mask"], torch.ones(2, 6, dtype=torch.int64)], dim=1)
    model.set_attn_implementation("eager")
    for ours, theirs in zip(steps.records(), full(model, tokens[:, :-1], real), strict=True):
        equal(ours, theirs, real.bool())


LATE = """
import sys, torch
from torch import nn
from sinkwise.capturing.capture import capture

class Late(nn.Module):
    def forward(self, x):
        from torch.nn.attention.flex_attention import flex_attention
        return torch.compile(flex_attention)(x, x, x)

assert "torch._dynamo" not in sys.modules
model, records = Late(), []
with torch.no_grad(), capture(model, records.append):
    model(torch.randn(2, 3, 13, 8))
assert "torch._dynamo" in sys.modules and len(records) == 1
assert torch._dynamo.eval_frame._stance.stance == "default"
"""


def test_a_compiler_that_is_loaded_during_the_forward_pass_is_switched_off() -> None:
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class WithSink(Flexible):
    """FlexAttention as gpt-oss uses it: the sink joins the denominator after the operator."""

    def __init__(self, way: str) -> None:
        super().__init__(causal, None, compiled=False)
        self.sinks, self.way = nn.Parameter(torch.linspace(-1, 1, 4)), way

    def forward(self, x: Tensor) -> Tensor:
        aux = AuxRequest(lse=True)
        out, more = self.function(*self.heads(x), block_mask=self.block_mask, enable_gqa=True,
                                  return_aux=aux)  # fmt: skip
        sinks = self.sinks[:, None]
        if self.way == "sigmoid":
            return out * torch.sigmoid(more.lse - sinks)[..., None]
        lse = more.lse.to(x.dtype).unsqueeze(-1)
        sinks = self.sinks.view(1, -1, 1, 1).expand(2, 4, TOKENS, 1)
        both = torch.logsumexp(torch.cat([lse, sinks], dim=-1), dim=-1, keepdim=True)
        return out * torch.exp(lse - both)


@pytest.mark.parametrize("way", ["sigmoid", "cat"])
def test_a_sink_logit_after_the_operator_is_in_the_record(way: str) -> None:
    model, x = WithSink(way), torch.randn(2, TOKENS, 24)
    before = _state(model)
    (captured,), (record,) = records_of(model, (x,))
    assert _state(model) == before
    wanted = model.sinks[None, :, None].expand(2, 4, TOKENS)
    torch.testing.assert_close(record.sink_logit, wanted.detach(), rtol=0, atol=0)
    assert torch.equal(record.out, captured) and record.lse is not None
    check(record)
    with torch.no_grad():
        assert torch.equal(captured, model(x))


def test_gpt_oss_is_rejected_on_a_cpu_by_transformers_itself() -> None:
    model, inputs = build("gpt-oss-eager")
    model.set_attn_implementation("flex_attention")
    with pytest.raises((ValueError, CaptureError), match=r"sinks cannot be run|log-sum-exp"):
        records_of(model, inputs)


def test_a_block_mask_that_excludes_more_than_its_function_is_an_error() -> None:
    model, _ = flexible("causal", "none")
    mask = create_block_mask(causal, None, None, 256, 256, device="cpu", BLOCK_SIZE=128)
    x = torch.randn(2, 256, 24)
    model.block_mask = mask
    records_of(model, (x,))
    mask.kv_num_blocks, mask.full_kv_num_blocks = (
        torch.zeros_like(count) for count in (mask.kv_num_blocks, mask.full_kv_num_blocks)
    )
    with pytest.raises(CaptureError, match="excludes keys that its mask_mod allows"):
        records_of(model, (x,))


def test_flash_attention_is_rejected_with_its_remedy() -> None:
    model, _ = build("llama-sdpa")
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(CaptureError, match=r"flash_attention_2.*set_attn_implementation"):
        with capture(model, lambda record: None):
            pytest.fail("the model would run")
