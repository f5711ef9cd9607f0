"""Every model passes every check, and every check can fail."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sinkwise.capturing.capture import capture
from sinkwise.conformance import (
    CHECKS,
    ConformanceError,
    calls,
    causality,
    check_model,
    observation,
    observe,
    weights,
)
from sinkwise.core.records import AttentionMask, AttentionRecord
from sinkwise.errors import CaptureError, InputError
from tests.models import CASES, EXTRA, NO_ATTENTION, Case, build

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*mismatched key_padding_mask:UserWarning",
    "ignore:.*enable_nested_tensor:UserWarning",
    "ignore:The PyTorch API of nested tensors:UserWarning",
    "ignore::FutureWarning",
)

SKIPPED = {
    "causality": "the inputs contain no sequence",
    "output_projection": "no attention module has an output projection",
}


@pytest.mark.parametrize("case", CASES + EXTRA, ids=lambda case: case.name)
def test_every_model_conforms(case: Case) -> None:
    model, inputs = case.build()
    results = {result.check: result for result in check_model(model, inputs)}
    assert len(results) == len(CHECKS)
    for result in results.values():
        if result.status == "skipped":
            assert result.message.startswith(SKIPPED[result.check])
        else:
            assert result.status == "passed"
    weights_alone = results["record_gives_the_output"].message
    assert bool(weights_alone) == (not all(case.each("faithful")))
    if results["causality"].status == "passed":
        causal = sum(case.each("causal"))
        assert results["causality"].message == f"{causal} of {len(case.layers)} calls are causal"


@pytest.mark.parametrize("name", ["llama-sdpa", "timm-vit-eager"])
def test_compiled_models_conform(name: str) -> None:
    model, inputs = build(name)
    check_model(torch.compile(model, backend="eager"), inputs)


def sharp(name: str) -> tuple[nn.Module, Any]:
    """A model whose maps are far from uniform, so that a wrong record is detected."""
    model, inputs = build(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return model, inputs


def corrupted(change: Callable[[AttentionRecord], None]) -> Callable:
    """`capture`, with records changed before the callback receives them."""

    def wrapped(model: nn.Module, on_record: Callable, **options: Any) -> Any:
        def hand_on(record: AttentionRecord) -> None:
            change(record)
            on_record(record)

        return capture(model, hand_on, **options)

    return wrapped


def repeat_heads(record: AttentionRecord) -> None:
    """What transformers' `repeat_kv` makes of grouped heads."""
    record.k, record.v = (t.repeat_interleave(record.group, 1) for t in (record.k, record.v))


def scale(record: AttentionRecord) -> None:
    record.scale *= 2


def no_mask(record: AttentionRecord) -> None:
    record.mask = AttentionMask()


def no_window(record: AttentionRecord) -> None:
    record.mask = AttentionMask(causal=True)


def swap_heads(record: AttentionRecord) -> None:
    record.out = record.out.flip(1)


def swap_values(record: AttentionRecord) -> None:
    record.v = record.v.flip(1)


def no_sink(record: AttentionRecord) -> None:
    record.sink_logit = None


def no_cap(record: AttentionRecord) -> None:
    record.softcap = None


def base_2(record: AttentionRecord) -> None:
    if record.lse is not None:
        record.lse = record.lse / torch.log(torch.tensor(2.0))


def negative(record: AttentionRecord) -> None:
    assert record.weights is not None
    record.weights = record.weights.clone()
    record.weights[..., 0, 0] = -0.1


def halved(record: AttentionRecord) -> None:
    assert record.weights is not None
    record.weights = record.weights / 2


def one_above(record: AttentionRecord) -> None:
    assert record.weights is not None
    record.weights = record.weights.clone()
    record.weights[..., 1, 2] = 1e-6


def unfaithful(record: AttentionRecord) -> None:
    record.faithful, record.weights = False, None


def flat_keys(record: AttentionRecord) -> None:
    record.k = record.k[..., :-1]


def no_group(record: AttentionRecord) -> None:
    record.v = record.v[:, :2]


def transposed(record: AttentionRecord) -> None:
    record.out = record.out.transpose(1, 2)


def wrong_mask(record: AttentionRecord) -> None:
    record.mask = AttentionMask(allowed=torch.ones(1, 1, 3, 3, dtype=torch.bool))


def next_layer(record: AttentionRecord) -> None:
    record.layer += record.layer > 0


def attention_only(record: AttentionRecord) -> None:
    """Layers counted over the records: the linear layers between them are forgotten."""
    record.layer = {1: 0, 3: 1}[record.layer]


def same_call(record: AttentionRecord) -> None:
    record.layer, record.call = 0, 0


def no_module(record: AttentionRecord) -> None:
    record.name += ".inner"


WRONG = [
    (calls.check_record_gives_the_output, "llama-sdpa", scale, "recomputed output"),
    (calls.check_record_gives_the_output, "gpt2-sdpa", no_mask, "recomputed output"),
    (calls.check_record_gives_the_output, "mistral-sdpa", no_window, "recomputed output"),
    (calls.check_record_gives_the_output, "vit-sdpa", swap_heads, "recomputed output"),
    (calls.check_record_gives_the_output, "llama-eager", swap_values, "recomputed output"),
    (calls.check_record_gives_the_output, "gpt-oss-eager", no_sink, "recomputed output"),
    (calls.check_record_gives_the_output, "gemma-2-eager", no_cap, "recomputed output"),
    (calls.check_record_gives_the_output, "vit-sdpa", unfaithful, "but no weights"),
    (calls.check_shapes, "llama-sdpa", flat_keys, "k is"),
    (calls.check_shapes, "llama-sdpa", no_group, "k is"),
    (calls.check_shapes, "vit-sdpa", transposed, "out is"),
    (calls.check_shapes, "vit-sdpa", wrong_mask, "allowed is"),
    (calls.check_probabilities, "vit-sdpa", base_2, "lse is off"),
    (calls.check_probabilities, "vit-sdpa", scale, "lse is off"),
    (calls.check_probabilities, "gpt-oss-eager", no_sink, "the sum of weights differs from 1"),
    (calls.check_probabilities, "vit-eager", negative, "a weight is -0.1"),
    (calls.check_probabilities, "vit-eager", halved, "the sum of weights differs from 1"),
    (causality.check_causality, "gpt2-sdpa", no_mask, "above the diagonal"),
    (causality.check_causality, "llama-eager", one_above, "above the diagonal is 1e-06"),
    (causality.check_causality, "nn-mha-causal", no_mask, "above the diagonal"),
    (weights.check_values_per_kv_head, "llama-sdpa", repeat_heads, "6 value heads.*has 3"),
    (weights.check_values_per_kv_head, "qwen3-eager", repeat_heads, "6 value heads.*has 3"),
    (
        weights.check_output_projection,
        "llama-sdpa",
        swap_heads,
        "input of the projection is not the heads",
    ),
    (
        weights.check_output_projection,
        "bert-sdpa",
        swap_heads,
        "input of the projection is not the heads",
    ),
    (
        weights.check_output_projection,
        "qwen3-next-sdpa",
        swap_heads,
        "input of the projection is not",
    ),
    (weights.check_output_projection, "nn-mha-plain", swap_heads, "gives a different output"),
    (calls.check_layers, "gpt2-sdpa", next_layer, "its block has number 1"),
    (calls.check_layers, "albert-sdpa", next_layer, "its block has number 1"),
    (calls.check_layers, "qwen3-next-sdpa", attention_only, "its block has number 1"),
    (calls.check_layers, "nn-decoder", same_call, "its block has number|same layer"),
    (calls.check_layers, "gpt2-sdpa", no_module, "is not a module"),
]


@pytest.mark.parametrize(
    ("check", "name", "change", "message"),
    WRONG,
    ids=[f"{check.__name__[6:]}-{name}-{change.__name__}" for check, name, change, _ in WRONG],
)
def test_a_wrong_record_fails(
    check: Callable, name: str, change: Callable, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = sharp(name)
    check_model(model, inputs, checks=(check,))
    monkeypatch.setattr(observation, "capture", corrupted(change))
    with pytest.raises(ConformanceError, match=message):
        check_model(model, inputs, checks=(check,))
    report = check_model(model, inputs, checks=(check,), on_fail="report")
    assert [result.status for result in report] == ["failed"]


@pytest.mark.parametrize("name", ["llama-sdpa", "gpt2-eager", "nn-mha-plain", "bert-sdpa"])
@pytest.mark.parametrize("wrong", ["heads", "sign"])
def test_a_wrong_output_projection_fails(
    name: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = sharp(name)
    original = observation.attention_sites

    def sites(model: nn.Module) -> dict:
        def change(o: Tensor) -> Tensor:
            return o.flip(0) if wrong == "heads" else -o

        found = original(model)
        return {n: dataclasses.replace(site, o=change(site.o)) for n, site in found.items()}

    hook = observation.observe_projections
    monkeypatch.setattr(observation, "attention_sites", sites)
    monkeypatch.setattr(
        observation,
        "observe_projections",
        lambda model, _, found: hook(model, original(model), found),
    )
    with pytest.raises(ConformanceError, match="W_O per head gives a different output"):
        check_model(model, inputs, checks=(weights.check_output_projection,))


def test_a_wrong_head_count_of_the_projection_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("vit-sdpa")
    original = observation.attention_sites

    def sites(model: nn.Module) -> dict:
        found = original(model)
        return {n: dataclasses.replace(site, q=site.q[:1], o=None) for n, site in found.items()}

    monkeypatch.setattr(observation, "attention_sites", sites)
    with pytest.raises(ConformanceError, match="5 heads, but the projection has 1"):
        check_model(model, inputs, checks=(calls.check_shapes,))


def test_repeated_heads_show_where_no_projection_is_known() -> None:
    model, inputs = build("llama-sdpa")
    seen = observe(model, inputs)
    for record in seen.records:
        record.site = None
    weights.check_values_per_kv_head(seen)
    repeat_heads(seen.records[0])
    with pytest.raises(ConformanceError, match="occurs twice"):
        weights.check_values_per_kv_head(seen)


def test_a_capture_that_changes_the_output_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("vit-sdpa")

    @contextlib.contextmanager
    def nudged(model: nn.Module, on_record: Callable, **options: Any) -> Iterator:
        bias = model.layernorm.bias
        with capture(model, on_record, **options) as coverage, torch.no_grad():
            before = bias.clone()
            bias[0] = torch.nextafter(bias[0], torch.tensor(10.0))
            yield coverage
            bias.copy_(before)

    monkeypatch.setattr(observation, "capture", nudged)
    with pytest.raises(ConformanceError, match="capture changed the output by"):
        check_model(model, inputs, checks=(calls.check_output_is_unchanged,))


def test_the_model_comes_back_in_its_mode() -> None:
    model, inputs = build("vit-sdpa")
    model.train()
    model.layernorm.eval()
    check_model(model, inputs, checks=())
    assert model.training and not model.layernorm.training


def test_unusable_arguments_are_named() -> None:
    model, inputs = build("vit-sdpa")
    with pytest.raises(InputError, match="on_fail='warn'"):
        check_model(model, inputs, on_fail="warn")
    with pytest.raises(InputError, match="holds no tensor"):
        check_model(model, {})


def test_a_model_without_attention_is_an_error() -> None:
    model, inputs = NO_ATTENTION["resnet"]()
    with pytest.raises(CaptureError, match="no softmax attention"):
        check_model(model, inputs)
