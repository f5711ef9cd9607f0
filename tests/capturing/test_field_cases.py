"""Cases from public threads about capturing attention that no other test has by itself."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sinkwise as sw
from sinkwise.capturing.capture import capture
from sinkwise.core.records import AttentionRecord
from tests.capturing.test_capture import recomputed
from tests.models import CASES, build, run

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def maps_of(model: nn.Module, inputs: Any) -> list[tuple[int, str, Tensor, Tensor]]:
    """(layer, name, map, rows that see a key) of every call, in float64."""
    kept: list[tuple[int, str, Tensor, Tensor]] = []

    def keep(record: AttentionRecord) -> None:
        _, _, weights, sees = recomputed(record)
        kept.append((record.layer, record.name, weights, sees))

    with torch.no_grad(), capture(model, keep):
        run(model, inputs)
    return kept


BOTH = [
    case.name.removesuffix("-sdpa")
    for case in CASES
    if case.name.endswith("-sdpa") and not case.name.startswith(("timm", "dinov2-hub"))
]


@pytest.mark.parametrize("name", BOTH)
def test_maps_under_sdpa_are_those_of_eager(name: str) -> None:
    """SDPA gives no attentions, or falls back to maps without the causal mask."""
    if name == "falcon-alibi":
        with torch.no_grad():
            one, other = (run(*build(f"{name}-{kernel}"))[0] for kernel in ("eager", "sdpa"))
        assert float((one - other).abs().max()) > 1e-2
        pytest.skip("transformers' two kernels compute different attentions here")
    eager, sdpa = (maps_of(*build(f"{name}-{kernel}")) for kernel in ("eager", "sdpa"))
    assert [entry[:2] for entry in eager] == [entry[:2] for entry in sdpa]
    for one, other in zip(eager, sdpa, strict=True):
        sees = one[3] & other[3]
        assert sees.any()
        rows = sees.expand(one[2].shape[:3])
        torch.testing.assert_close(one[2][rows], other[2][rows], rtol=0, atol=1e-5)
        torch.testing.assert_close(one[2][rows].sum(-1), torch.ones_like(one[2][rows].sum(-1)))


def own_softmax(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """A registered attention function that gives no weights away."""
    group = query.shape[1] // key.shape[1]
    scores = torch.einsum("bhid,bhjd->bhij", query, key.repeat_interleave(group, 1))
    scores = scores * kwargs["scaling"] + torch.where(mask, 0.0, -torch.inf)
    weights = scores.softmax(dim=-1)
    return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), None


def own_kernel(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Another one, by torch's kernel."""
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=kwargs["scaling"], enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


@pytest.mark.parametrize("function", [own_softmax, own_kernel])
def test_attention_functions_of_any_name_are_captured(
    function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, mask = function.__name__, transformers.masking_utils.sdpa_mask
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, name, function)
    monkeypatch.setitem(transformers.AttentionMaskInterface._global_mapping, name, mask)
    expected = maps_of(*build("llama-eager"))
    model, inputs = build("llama-eager")
    model.set_attn_implementation(name)
    found = maps_of(model, inputs)
    assert len(found) == len(expected) == 2
    for one, other in zip(found, expected, strict=True):
        rows = one[3].expand(one[2].shape[:3])
        torch.testing.assert_close(one[2][rows], other[2][rows], rtol=0, atol=1e-5)


def test_a_long_batch_is_a_table_of_layers_and_heads() -> None:
    """No map of 3 x 5 x 1,500 x 1,500 is built, and nothing is limited to one sample."""
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=40, intermediate_size=53, num_hidden_layers=2,
        num_attention_heads=5, num_key_value_heads=5, max_position_embeddings=1500,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaModel(config)
    ids = torch.randint(3, 97, (3, 1500))
    largest = 0
    original = torch.Tensor.numel

    def keep(record: AttentionRecord) -> None:
        nonlocal largest
        assert record.weights is None
        largest = max(largest, *(original(t) for t in (record.q, record.k, record.v, record.out)))

    with torch.no_grad(), capture(model, keep):
        model(ids)
    assert largest == 3 * 1500 * 40
    scan = sw.scan(model, [ids], rules="mean")
    assert len(scan.heads) == 10 and scan.heads["samples"].to_list() == [3] * 10
