"""Capture under everything torch can do to a model: compilation, training, caches, precision."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from sinkwise.capturing.capture import capture
from sinkwise.capturing.mode import ADAPTERS
from sinkwise.core.records import AttentionMask, AttentionRecord
from sinkwise.errors import CaptureError
from sinkwise.interception.intercepted import Intercepted
from tests.capturing.test_capture import check, collect
from tests.models import build, run, tensors
from tests.models.nn_models import STATE_SPACE


@pytest.mark.parametrize("name", ["timm-vit-sdpa", "timm-vit-eager", "llama-sdpa"])
@pytest.mark.parametrize("way", ["wrapped", "in place", "part"])
def test_compiled_models_run_eagerly_and_keep_their_names(name: str, way: str) -> None:
    model, inputs = build(name)
    with torch.no_grad():
        plain, expected = collect(model, inputs)
        compiled: Any = model
        if way == "wrapped":
            compiled = torch.compile(model, backend="eager")
        elif way == "in place":
            model.compile(backend="eager")
        else:
            for parent in model.modules():
                if isinstance(parent, nn.ModuleList | nn.Sequential) and len(parent) == 2:
                    parent[0] = torch.compile(parent[0], backend="eager")
                    break
        for _ in range(2):
            captured, seen = collect(compiled, inputs)
            assert seen == expected
            run(compiled, inputs)
    for one, other in zip(plain, captured, strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["llama-sdpa", "gpt2-eager"])
def test_checkpointed_layers_are_recorded_once(name: str, reentrant: bool) -> None:
    model, inputs = build(name)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    records: list = []
    blocks: list = []
    with capture(model, lambda r: records.append(r.layer), on_block=lambda *b: blocks.append(b[0])):
        loss = model(**inputs, use_cache=False).logits.sum()
        loss.backward()
    assert records == [0, 1] and len(blocks) == 2
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", ["llama-sdpa", "timm-vit-eager", "bert-eager", "nn-encoder"])
def test_gradients_are_the_same(name: str) -> None:
    model, inputs = build(name)
    twin = copy.deepcopy(model)
    sum(t.sum() for t in tensors(run(model, inputs)) if t.requires_grad).backward()
    with capture(twin, lambda record: None):
        out = tensors(run(twin, inputs))
        sum(t.sum() for t in out if t.requires_grad).backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["gpt2-sdpa", "gpt2-eager", "bert-eager", "nn-mha-weights"])
def test_dropout_draws_the_same(name: str) -> None:
    model, inputs = build(name)
    for module in model.modules():
        if hasattr(module, "dropout") and isinstance(module.dropout, float):
            module.dropout = 0.3
    model.train()
    records: list[AttentionRecord] = []
    torch.manual_seed(3)
    plain = tensors(run(model, inputs))
    torch.manual_seed(3)
    with capture(model, records.append):
        captured = tensors(run(model, inputs))
    for one, other in zip(plain, captured, strict=True):
        assert torch.equal(one, other)
    assert records and all(record.faithful for record in records)


@pytest.mark.parametrize("name", ["llama-sdpa", "timm-vit-eager", "nn-encoder"])
def test_inference_mode(name: str) -> None:
    model, inputs = build(name)
    with torch.inference_mode():
        _, seen = collect(model, inputs)
    assert len(seen) == 2


@pytest.mark.parametrize("name", ["llama-sdpa", "llama-eager", "timm-vit-sdpa", "timm-vit-eager"])
def test_autocast_computes_what_it_would(name: str) -> None:
    model, inputs = build(name)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        plain = tensors(run(model, inputs))
        with capture(model, lambda record: None):
            captured = tensors(run(model, inputs))
    for one, other in zip(plain, captured, strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["llama-sdpa", "llama-left-eager", "mistral-sdpa", "gpt2-sdpa",
    "qwen3-sliding-eager", "t5-sdpa", "bart-eager"])  # fmt: skip
def test_generation_with_a_cache(name: str) -> None:
    import transformers

    model, inputs = build(name)
    inputs.pop("decoder_input_ids", None)
    if not hasattr(model, "generate") or not model.can_generate():
        head = type(model).__name__.replace("Model", "ForCausalLM")
        head = {"BartForCausalLM": "BartForConditionalGeneration"}.get(head, head)
        model = getattr(transformers, head)._from_config(
            model.config, attn_implementation=name.rpartition("-")[2]
        )
        model.eval()
    heads = model.config.num_attention_heads
    steps: list[tuple[int, int]] = []

    def on_record(record: AttentionRecord) -> None:
        check(record)
        assert record.q.shape[1] == heads
        steps.append((record.q.shape[2], record.k.shape[2]))

    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(**inputs, **options)
    with capture(model, on_record):
        captured = model.generate(**inputs, **options)
    assert torch.equal(plain, captured)
    assert any(queries == 1 and keys > 1 for queries, keys in steps)


def test_a_kernel_that_cannot_be_captured_is_named_with_its_remedy() -> None:
    from transformers import AttentionInterface

    @torch.library.custom_op("sinkwise_test::flash", mutates_args=())
    def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).clone()

    def kernel(module: nn.Module, q: Any, k: Any, v: Any, mask: Any, scaling: float, **_: Any):
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        return flash(q, k, v, scaling).transpose(1, 2), None

    AttentionInterface.register("sinkwise_unseen", kernel)
    try:
        model, inputs = build("llama-sdpa")
        model.set_attn_implementation("sinkwise_unseen")
        with pytest.raises(CaptureError, match=r"sinkwise_unseen.*set_attn_implementation"):
            with torch.no_grad(), capture(model, lambda record: None):
                run(model, inputs)
    finally:
        AttentionInterface._global_mapping.pop("sinkwise_unseen", None)


def new_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention whose inside no trace understands."""
    if has_torch_function((q, k, v)):
        return handle_torch_function(new_kernel, (q, k, v), q, k, v)
    scores = torch.exp(q @ k.mT)
    return (scores / scores.sum(dim=-1, keepdim=True)) @ v


class Newest(nn.Module):
    """A module that calls a kernel of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return new_kernel(x, x, x)


def test_a_new_kernel_needs_one_adapter_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def adapter(func: Any, args: tuple, kwargs: dict) -> tuple:
        out = func(*args, **kwargs)
        q, k, v = args
        return out, lambda owner: Intercepted(
            {"q": q, "k": k, "v": v, "out": out, "scale": 1.0, "mask": AttentionMask()}
        )

    model, inputs = Newest(), (torch.randn(2, 3, 13, 8),)
    with pytest.raises(CaptureError, match="no softmax attention"):
        collect(model, inputs)
    monkeypatch.setitem(ADAPTERS, new_kernel, adapter)
    (captured,), seen = collect(model, inputs)
    assert torch.equal(captured, model(*inputs)) and seen == [(0, "", 0, True)]


def test_blocks_without_softmax_attention_are_named() -> None:
    model, inputs = build("qwen3-next-sdpa")
    with torch.no_grad(), capture(model, lambda record: None) as coverage:
        run(model, inputs)
    assert coverage.silent == ("layers.0", "layers.2")


@pytest.mark.parametrize("name", STATE_SPACE)
def test_state_space_models_have_no_attention(name: str) -> None:
    model, inputs = STATE_SPACE[name]()
    records: list = []
    with pytest.raises(CaptureError, match="no softmax attention was seen"):
        with torch.no_grad(), capture(model.eval(), records.append):
            run(model, inputs)
    assert records == []


def test_two_towers_called_by_their_methods() -> None:
    model, (images, ids) = build("open_clip")
    layers: list[int] = []
    with torch.no_grad(), capture(model, lambda record: layers.append(record.layer)):
        model.encode_image(images)
        model.encode_text(ids)
    assert layers == [0, 1, 2, 3]


class Overwritten(nn.Module):
    """Scores changed by assignment, as MViT v2 adds relative positions to a part of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = x @ x.mT
        scores[:, 1:, 1:] = scores[:, 1:, 1:] + torch.linspace(0, 3, 12)
        return scores.softmax(dim=-1) @ x


@pytest.mark.parametrize("check", [True, False])
def test_overwritten_scores_are_marked_at_every_call(check: bool) -> None:
    model, faithful = Overwritten(), []
    with capture(model, lambda record: faithful.append(record.faithful), check=check):
        for _ in range(2):
            model(torch.randn(2, 13, 24))
    assert faithful == [False, False]


class Written(nn.Module):
    """Attention as users write it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.qkv, self.way = nn.Linear(24, 72), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        heads = [part.unflatten(-1, (3, 8)) for part in (q, k, v)]
        q, k, v = (part.transpose(1, 2) for part in heads)
        match self.way:
            case "einsum":
                a = torch.einsum("bqhd,bkhd->bhqk", *heads[:2]).mul(0.3).softmax(-1)
                return torch.einsum("bhqk,bkhd->bqhd", a, heads[2])
            case "einsum, heads last":
                a = (torch.einsum("bqhd,bkhd->bqkh", *heads[:2]) * 0.3).softmax(2)
                return torch.einsum("bqkh,bkhd->bqhd", a, heads[2])
            case "keys first":
                a = ((k @ q.mT) * 0.3).softmax(dim=-2)
                return (v.mT @ a).mT
            case "transposed weights":
                a = torch.softmax(0.3 * torch.matmul(q, k.transpose(-2, -1)), dim=3)
                return torch.matmul(v.transpose(2, 3), a.permute(0, 1, 3, 2)).transpose(2, 3)
            case "temperature":
                a = (q @ k.mT) * torch.tensor([0.2, 0.4, 0.6])[:, None, None] + 0.1
                return (a - a.amax(-1, keepdim=True)).softmax(-1) @ v
            case "softcap":
                a = 2.0 * torch.tanh((q @ k.mT) * 0.3 / 2.0)
                return a.masked_fill(torch.ones(13, 13).triu(1).bool(), -1e30).softmax(-1) @ v
            case "baddbmm":
                flat = [part.flatten(0, 1) for part in (q, k, v)]
                bias = torch.linspace(0, 1, 13).expand(6, 13, 13)
                a = torch.baddbmm(bias, flat[0], flat[1].mT, beta=0.5, alpha=0.3)
                return torch.bmm(F.softmax(a, -1), flat[2]).unflatten(0, (2, 3))
        raise AssertionError(self.way)


WAYS = ["einsum", "einsum, heads last", "keys first", "transposed weights", "temperature",
        "softcap", "baddbmm"]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_attention_written_by_hand(way: str) -> None:
    torch.manual_seed(0)
    model = Written(way)
    _, seen = collect(model, (torch.randn(2, 13, 24),))
    assert seen == [(0, "", 0, True)]
