"""A generation's steps joined are the record of one full forward pass over its tokens."""

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sinkwise.capturing.capture import capture
from sinkwise.capturing.generation import ModuleSteps, Steps
from sinkwise.core.records import AttentionMask, AttentionRecord
from sinkwise.errors import InputError
from tests.capturing.test_capture import check, recomputed
from tests.models import build, ids

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

MODELS = {
    "llama-sdpa": 2, "llama-eager": 2, "gpt2-sdpa": 2, "gpt2-eager": 2, "mistral-sdpa": 2,
    "mistral-eager": 2, "gemma-3-sdpa": 2, "gemma-3-eager": 2, "qwen3-sliding-sdpa": 2,
    "gpt-oss-eager": 2, "gemma-2-eager": 2, "bloom-eager": 2, "falcon-alibi-sdpa": 2,
    "gpt-neox-sdpa": 2, "deepseek-v3-sdpa": 2, "qwen3-next-sdpa": 2,
}  # fmt: skip
"""How many modules attend."""
GREEDY = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False, "pad_token_id": 0}


def generator(name: str) -> nn.Module:
    """The model of that name with its language-model head; hybrids get a full-attention layer."""
    import transformers

    model, _ = build(name)
    if not hasattr(model, "lm_head"):
        head = type(model).__name__.removesuffix("Model").removesuffix("Text") + "ForCausalLM"
        kernel = name.rpartition("-")[2]
        config = model.config
        if name.startswith("gemma-3"):
            config.layer_types = ["sliding_attention", "full_attention"]
        torch.manual_seed(11)
        model = getattr(transformers, head)._from_config(config, attn_implementation=kernel)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(2.0)
    return model.eval()


def prompt(pads: int) -> dict[str, Tensor]:
    """Two texts of nine tokens, of which the second begins with padding."""
    torch.manual_seed(4)
    tokens, mask = ids(9), torch.ones(2, 9, dtype=torch.int64)
    tokens[1, :pads], mask[1, :pads] = 0, 0
    return {"input_ids": tokens, "attention_mask": mask}


def positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)


@torch.no_grad()
def full(model: nn.Module, tokens: Tensor, mask: Tensor) -> list[AttentionRecord]:
    """The records of one forward pass over all tokens."""
    records: list[AttentionRecord] = []
    with capture(model, records.append):
        inputs: dict[str, Any] = {"input_ids": tokens, "attention_mask": mask, "use_cache": False}
        if "position_ids" in inspect.signature(model.forward).parameters:
            inputs["position_ids"] = positions(mask)
        model(**inputs)
    return records


def equal(ours: AttentionRecord, theirs: AttentionRecord, real: Tensor) -> None:
    """Two records agree on all real tokens."""
    assert (ours.layer, ours.name) == (theirs.layer, theirs.name)
    assert ours.scale == pytest.approx(theirs.scale)
    assert ours.softcap == theirs.softcap and ours.k.shape == theirs.k.shape
    for one, other in ((ours.q, theirs.q), (ours.k, theirs.k), (ours.v, theirs.v),
                       (ours.out, theirs.out)):  # fmt: skip
        one, other = (t.transpose(1, 2)[real] for t in (one, other))
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    maps = [recomputed(record)[2].transpose(1, 2)[real] for record in (ours, theirs)]
    torch.testing.assert_close(*maps, rtol=0, atol=1e-5)
    if ours.lse is not None and theirs.lse is not None:
        lses = [record.lse.transpose(1, 2)[real] for record in (ours, theirs)]
        torch.testing.assert_close(*lses, rtol=1e-5, atol=1e-5)
    if ours.residual is not None:
        torch.testing.assert_close(ours.residual[real], theirs.residual[real], rtol=0, atol=1e-4)
    check(ours)


@pytest.mark.parametrize("pads", [0, 3], ids=["whole", "left padding"])
@pytest.mark.parametrize("name", MODELS)
def test_the_steps_of_generate_are_one_forward(name: str, pads: int) -> None:
    model, inputs = generator(name), prompt(pads)
    plain = model.generate(**inputs, **GREEDY)
    steps, seen = Steps(), []
    with capture(model, lambda record: (steps.add(record), seen.append(record.q.shape[2]))):
        tokens = model.generate(**inputs, **GREEDY)
    assert torch.equal(plain, tokens)
    joined = steps.records()
    assert len(joined) == MODELS[name] and set(seen) == {9, 1}
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 6, dtype=torch.int64)], dim=1)
    for ours, theirs in zip(joined, full(model, tokens[:, :-1], mask), strict=True):
        assert ours.q.shape[2] == ours.k.shape[2] == 15
        if not pads and ours.mask.additive is None:
            assert ours.mask.causal and ours.mask.offset == 0 and ours.mask.allowed is None
            assert ours.mask.window == theirs.mask.window
        equal(ours, theirs, mask.bool())


@pytest.mark.parametrize("pads", [0, 3], ids=["whole", "left padding"])
@pytest.mark.parametrize("name", ["llama-sdpa", "llama-eager", "mistral-sdpa", "gemma-3-sdpa"])
def test_a_static_cache(name: str, pads: int) -> None:
    model, inputs, steps = generator(name), prompt(pads), Steps()
    with capture(model, steps.add):
        tokens = model.generate(**inputs, **GREEDY, cache_implementation="static")
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 6, dtype=torch.int64)], dim=1)
    for ours, theirs in zip(steps.records(), full(model, tokens[:, :-1], mask), strict=True):
        equal(ours, theirs, mask.bool())


@pytest.mark.parametrize("sizes", [(5, 5, 5), (9, 2, 4), (1, 1, 13), (14, 1)], ids=str)
@pytest.mark.parametrize("name", ["llama-sdpa", "llama-eager", "gpt2-sdpa", "mistral-sdpa",
    "mistral-eager", "gemma-3-sdpa", "gpt-oss-eager"])  # fmt: skip
@torch.no_grad()
def test_a_prefill_in_chunks_is_one_forward(name: str, sizes: tuple[int, ...]) -> None:
    model, tokens, steps = generator(name), ids(15), Steps()
    cache, start = None, 0
    ranges: list[range] = []

    def on_record(record: AttentionRecord) -> None:
        rows = range(record.q.shape[2])
        first, last = record.mask.position_range(rows)
        ranges.append(range(first, last + 1))
        assert last == record.k.shape[2] - 1
        steps.add(record)

    with capture(model, on_record):
        for size in sizes:
            chunk = tokens[:, start : start + size]
            cache = model(chunk, past_key_values=cache, use_cache=True).past_key_values
            start += size
    mask = torch.ones_like(tokens)
    for ours, theirs in zip(steps.records(), full(model, tokens, mask), strict=True):
        assert ours.mask.causal and ours.mask.allowed is None and ours.mask.offset == 0
        assert ours.mask.window == theirs.mask.window
        equal(ours, theirs, mask.bool())
    if name.startswith(("llama", "gpt2")):
        stops = [sum(sizes[: index + 1]) for index in range(len(sizes))]
        expected = [range(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]
        assert ranges == [each for each in expected for _ in range(2)]


@pytest.mark.parametrize("name", ["t5-sdpa", "t5-eager", "bart-sdpa", "whisper-eager"])
def test_encoder_decoders_keep_the_encoder_s_keys_once(name: str) -> None:
    import transformers

    model, inputs = build(name)
    inputs.pop("decoder_input_ids")
    if not hasattr(model, "lm_head"):
        head = type(model).__name__.replace("Model", "ForConditionalGeneration")
        kernel = name.rpartition("-")[2]
        model = getattr(transformers, head)._from_config(model.config, attn_implementation=kernel)
        model.eval()
    steps = Steps()
    with capture(model, steps.add):
        options = {**GREEDY, "max_new_tokens": 4, "min_new_tokens": 4}
        tokens = model.generate(**inputs, **options)
    tokens = tokens[:, :-1] if tokens.shape[1] > 4 else tokens
    keys = next(iter(inputs.values())).shape[-1] // (2 if name.startswith("whisper") else 1)
    for record in steps.records():
        check(record)
        crossed = "ncoder" in record.name and ("EncDec" in record.name or "_attn" in record.name)
        if record.q.shape[2] == record.k.shape[2]:
            continue
        assert crossed or ".layer.1." in record.name
        assert record.k.shape[2] == keys and not record.mask.causal


def test_a_record_may_begin_in_the_middle() -> None:
    model, tokens = generator("llama-sdpa"), ids(12)
    steps = Steps()
    with torch.no_grad():
        cache = model(tokens[:, :5], use_cache=True).past_key_values
        with capture(model, steps.add):
            cache = model(tokens[:, 5:8], past_key_values=cache, use_cache=True).past_key_values
            model(tokens[:, 8:], past_key_values=cache, use_cache=True)
    whole = full(model, tokens, torch.ones_like(tokens))
    for ours, theirs in zip(steps.records(), whole, strict=True):
        assert ours.mask.offset == 5 and ours.q.shape[2] == 7 and ours.k.shape[2] == 12
        torch.testing.assert_close(ours.out, theirs.out[:, :, 5:], rtol=1e-5, atol=1e-5)
        maps = recomputed(ours)[2], recomputed(theirs)[2][:, :, 5:]
        torch.testing.assert_close(*maps, rtol=0, atol=1e-5)


def step(length: int, keys: Tensor, queries: int = 1, **fields: Any) -> AttentionRecord:
    q = torch.randn(2, 3, queries, 8)
    given = {"layer": 0, "name": "a", "q": q, "k": keys, "v": keys, "out": q, "scale": 0.3}
    mask = AttentionMask(causal=queries > 1, offset=length - queries)
    return AttentionRecord(**{**given, "mask": mask, **fields})


def test_a_cache_that_lost_keys_is_an_error() -> None:
    keys = torch.randn(2, 3, 9, 8)
    steps = ModuleSteps()
    steps.add(step(7, keys[:, :, :7], queries=7))
    steps.add(step(8, keys[:, :, :8]))
    evicted = torch.cat([keys[:, :, :2], keys[:, :, 4:]], dim=2)
    with pytest.raises(InputError, match="step 2 does not hold the keys"):
        steps.add(step(7, evicted))
    with pytest.raises(InputError, match="step 2 does not hold the keys"):
        steps.add(step(9, keys.flip(0)))
    steps.add(step(9, keys))
    assert steps.joined().mask.causal


def test_steps_of_two_scales_and_of_none_are_errors() -> None:
    keys, steps = torch.randn(2, 3, 9, 8), ModuleSteps()
    with pytest.raises(InputError, match="no step was added"):
        steps.joined()
    steps.add(step(8, keys[:, :, :8], queries=8))
    steps.add(replace(step(9, keys), scale=0.5))
    with pytest.raises(InputError, match="scale or softcap"):
        steps.joined()


def test_maps_are_joined_where_no_other_field_determines_them() -> None:
    keys, steps = torch.randn(2, 3, 5, 8), ModuleSteps()
    maps = [torch.rand(2, 3, 4, 4), torch.rand(2, 3, 1, 5)]
    steps.add(step(4, keys[:, :, :4], queries=4, weights=maps[0], faithful=False))
    steps.add(step(5, keys, weights=maps[1], faithful=False))
    joined = steps.joined()
    assert not joined.faithful and joined.weights is not None
    assert torch.equal(joined.weights[:, :, 4:], maps[1])
    assert torch.equal(joined.weights[:, :, :4, :4], maps[0])
    assert not joined.weights[:, :, :4, 4].any()


def test_nothing_kept_is_a_view_of_a_cache_that_is_overwritten() -> None:
    keys, steps = torch.randn(2, 3, 9, 8), ModuleSteps()
    before = keys.clone()
    steps.add(step(8, keys[:, :, :8], queries=8))
    steps.add(step(9, keys))
    keys.zero_()
    assert torch.equal(steps.joined().k, before)


def test_values_of_the_first_layers_attention_are_right() -> None:
    """The joined record's own fields reproduce the module's outputs."""
    model, steps = generator("mistral-sdpa"), Steps()
    with capture(model, steps.add):
        model.generate(**prompt(0), **GREEDY)
    for record in steps.records():
        out, _, weights, _ = recomputed(record)
        torch.testing.assert_close(record.out.double(), out, rtol=0, atol=1e-5)
        assert record.mask.window == 5 and int((weights[0, 0, -1] > 0).sum()) == 5
