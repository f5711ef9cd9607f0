"""Half precision and grouped heads: statistics in float32, keys never repeated in memory."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from sinkwise.attention.received import received_mass, row_lse
from sinkwise.capturing.capture import capture
from sinkwise.conformance import check_model
from sinkwise.core.records import AttentionRecord
from tests.capturing.test_capture import recomputed
from tests.models import build, run

HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def halved(name: str, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    """The model and its inputs in half precision."""
    model, inputs = build(name)

    def cast(value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if floating else value

    if isinstance(inputs, dict):
        return model.to(dtype), {key: cast(value) for key, value in inputs.items()}
    return model.to(dtype), tuple(cast(value) for value in inputs)


@HALVES
@pytest.mark.parametrize("name", ["vit-sdpa", "vit-eager", "llama-sdpa", "llama-eager",
    "llama-left-sdpa", "mistral-sdpa", "gemma-2-eager", "gpt-oss-eager", "gpt2-sdpa", "bert-sdpa",
    "t5-sdpa", "timm-eva-grouped-sdpa", "timm-beit-eager", "qwen3-next-sdpa",
    "dinov2-registers-sdpa", "nn-mha-weights", "nn-encoder"])  # fmt: skip
def test_models_conform_in_half_precision(name: str, dtype: torch.dtype) -> None:
    model, inputs = halved(name, dtype)
    assert {result.status for result in check_model(model, inputs)} <= {"passed", "skipped"}


@HALVES
@pytest.mark.parametrize("name", ["vit-sdpa", "llama-sdpa", "gpt-oss-eager", "t5-sdpa"])
def test_received_attention_is_float32_and_right(name: str, dtype: torch.dtype) -> None:
    """Against the record's own half-precision q and k, taken to float64: float32 rounding only."""
    model, inputs = halved(name, dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(1.5)
    seen = 0

    def on_record(record: AttentionRecord) -> None:
        nonlocal seen
        seen += 1
        _, lse, weights, _ = recomputed(record)
        fields = {"scale": record.scale, "mask": record.mask, "sink_logit": record.sink_logit}
        for method in ("tiles", "flash"):
            mass, ours = received_mass(record.q, record.k, method=method, **fields)
            assert mass.dtype == ours.dtype == torch.float32
            torch.testing.assert_close(ours.double(), lse, rtol=1e-5, atol=1e-4)
            limit = 1e-4 if method == "tiles" else 2e-2  # the kernel rounds its own weights
            torch.testing.assert_close(mass.double(), weights.sum(dim=2), rtol=limit, atol=limit)

    with torch.no_grad(), capture(model, on_record):
        run(model, inputs)
    assert seen >= 2


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes in new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in given:
                self.entries = max(self.entries, made.numel())
        return result


class Grouped(nn.Module):
    """One key/value head for sixteen query heads, by torch's own grouped attention."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=False, enable_gqa=True)


HEADS, KEYS, WIDTH, QUERIES = 16, 509, 128, 11
REPEATED = HEADS * KEYS * WIDTH


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grouped_keys_are_never_repeated_in_memory(dtype: torch.dtype) -> None:
    q = torch.randn(1, HEADS, QUERIES, WIDTH, dtype=dtype)
    k, v = torch.randn(2, 1, 1, KEYS, WIDTH, dtype=dtype)
    largest = Largest()
    masses: list[Tensor] = []

    def on_record(record: AttentionRecord) -> None:
        assert record.k.shape[1] == 1 and record.group == HEADS
        assert record.k.data_ptr() == k.data_ptr() and record.v.data_ptr() == v.data_ptr()
        with largest:
            given = {"scale": record.scale, "mask": record.mask}
            row_lse(record.q, record.k, **given)
            for lse in (record.lse, None):
                masses.append(received_mass(record.q, record.k, lse=lse, **given).mass)

    model = Grouped()
    with torch.no_grad(), capture(model, on_record, check=False):
        model(q, k, v)
    assert 0 < largest.entries < REPEATED / 2
    scores = q.double() @ k.double().mT * WIDTH**-0.5
    for mass in masses:
        torch.testing.assert_close(mass.double(), scores.softmax(-1).sum(2), rtol=1e-4, atol=1e-4)


def test_the_count_of_memory_can_fail() -> None:
    k = torch.randn(1, 1, KEYS, WIDTH)
    with Largest() as largest:
        k.expand(1, HEADS, KEYS, WIDTH)
        assert largest.entries == 0
        k.repeat_interleave(HEADS, dim=1)
    assert largest.entries == REPEATED
