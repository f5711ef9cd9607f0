"""Capture is correct on every model: outputs unchanged, records complete, each one recomputed."""

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
import torch._dynamo.eval_frame
from torch import Tensor, nn
from torch.nn import functional as F

from sinkwise.capturing.capture import capture
from sinkwise.capturing.mode import CaptureMode
from sinkwise.core.records import AttentionMask, AttentionRecord
from sinkwise.errors import CaptureError
from sinkwise.interception.intercepted import Intercepted
from tests.models import CASES, NO_ATTENTION, Case, build, run, tensors

cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*mismatched key_padding_mask:UserWarning",
    "ignore:.*enable_nested_tensor:UserWarning",
    "ignore:The PyTorch API of nested tensors:UserWarning",
    "ignore::FutureWarning",
)


def recomputed(record: AttentionRecord) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, weights, rows that see a key) in float64, straight from the formula."""
    q, k, v = (tensor.detach().double() for tensor in (record.q, record.k, record.v))
    heads, kv_heads = q.shape[1], k.shape[1]
    index = torch.arange(heads) // (heads // kv_heads)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k[:, index]) * record.scale
    if record.softcap is not None:
        scores = torch.tanh(scores / record.softcap) * record.softcap
    mask, hidden = record.mask, torch.zeros(scores.shape, dtype=torch.bool)
    if mask.additive is not None:
        bias = mask.additive.detach()
        hidden |= bias <= torch.finfo(bias.dtype).min / 2
        scores = scores + bias.double()
    if mask.allowed is not None:
        hidden |= ~mask.allowed
    if mask.causal:
        rows, cols = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
        hidden |= cols > rows + mask.offset
        if mask.window is not None:
            hidden |= cols <= rows + mask.offset - mask.window
    scores = scores.masked_fill(hidden, -torch.inf)
    sees = ~hidden.all(dim=-1)
    columns = scores
    if record.sink_logit is not None:
        sink = record.sink_logit.detach().double().expand(scores.shape[:3])
        columns = torch.cat([scores, sink[..., None]], dim=-1)
    top = columns.amax(dim=-1, keepdim=True).clamp(min=-1e300)
    exponentials = (columns - top).exp()
    total = exponentials.sum(dim=-1, keepdim=True)
    weights = (exponentials / total)[..., : k.shape[2]].nan_to_num(0.0)
    out = torch.einsum("bhqk,bhkd->bhqd", weights, v[:, index])
    return out, (total.log() + top)[..., 0], weights, sees


def distance(one: Tensor, other: Tensor, rows: Tensor) -> float:
    """The largest difference in the given rows, over the largest entry there."""
    one, other = one.detach().double()[rows], other.double()[rows]
    return float((one - other).abs().max() / other.abs().max())


def check(record: AttentionRecord, tolerance: float = 1e-4) -> Tensor:
    """Check that the record describes what the model did; the map in float64 is returned."""
    batch, heads, queries, width = record.q.shape
    keys = record.k.shape[2]
    assert record.k.shape[:1] + record.k.shape[2:] == (batch, keys, width)
    assert record.v.shape[:3] == record.k.shape[:3] and heads % record.k.shape[1] == 0
    assert record.out.shape == (batch, heads, queries, record.v.shape[3])
    out, lse, weights, sees = recomputed(record)
    if record.weights is not None:
        group = record.v.detach().double().repeat_interleave(record.group, dim=1)
        consumed = record.weights.detach().double() @ group
        assert distance(record.out, consumed, sees) <= tolerance
    if record.faithful:
        assert distance(record.out, out, sees) <= tolerance
        if record.weights is not None:
            assert distance(record.weights, weights, sees) <= tolerance
    if record.lse is not None:
        assert float((record.lse.double() - lse)[sees].abs().max()) <= tolerance * 10
    return weights


def collect(model: nn.Module, inputs: Any, **options: Any) -> tuple[list[Tensor], list]:
    """The model's tensors while captured, and (layer, name, call, faithful) of its records."""
    seen: list = []

    def on_record(record: AttentionRecord) -> None:
        check(record)
        seen.append((record.layer, record.name, record.call, record.faithful))

    with capture(model, on_record, **options):
        out = tensors(run(model, inputs))
    return out, seen


@cases
def test_outputs_and_records(case: Case) -> None:
    model, inputs = case.build()
    names = dict(model.named_modules())
    entered: dict[str, list[Tensor]] = {}

    def enter(name: str):
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            given = tensors([*args, *kwargs.values()])
            entered.setdefault(name, []).extend(t.clone() for t in given if t.dim() == 3)

        return hook

    seen: list[AttentionRecord] = []

    def on_record(record: AttentionRecord) -> None:
        causal = case.each("causal")[len(seen)]
        weights = check(record)
        assert record.name in names
        assert record.group == case.grouped
        for attention_map in (weights, record.weights):
            if causal and attention_map is not None:
                sees = weights.sum(dim=-1, keepdim=True) > 0  # not where padding masks every key
                assert float((attention_map * sees).triu(1).abs().max()) == 0.0
        if not causal and record.q.shape[2] > 1:
            assert float(weights.triu(1).max()) > 0.0
        assert (record.residual is not None) == case.each("residual")[len(seen)]
        if record.residual is not None:
            above = [name for name in entered if (record.name + ".").startswith(name + ".")]
            blocks = [name for name in above if name.rpartition(".")[2].isdigit()]
            found = [torch.equal(t, record.residual) for n in blocks for t in entered[n]]
            assert any(found)
        seen.append(record)

    with torch.no_grad():
        plain = tensors(run(model, inputs))
        hooks = [
            module.register_forward_pre_hook(enter(name), with_kwargs=True)
            for name, module in names.items()
        ]
        with capture(model, on_record) as coverage:
            captured = tensors(run(model, inputs))
        for hook in hooks:
            hook.remove()
    assert tuple(record.layer for record in seen) == case.layers
    assert tuple(record.faithful for record in seen) == case.each("faithful")
    assert coverage.records == len(seen)
    assert len(coverage.silent) == case.silent
    assert len(plain) == len(captured) > 0
    for one, other in zip(plain, captured, strict=True):
        if not case.fast_path:
            assert torch.equal(one, other)
        elif case.name == "nn-encoder-nested":  # padded rows: zeros of a nested tensor, or not
            real = one.abs().sum(dim=-1) > 0
            torch.testing.assert_close(one[real], other[real], rtol=0, atol=2e-6)
        else:
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


EAGER = [
    case
    for case in CASES
    if case.name.endswith("-eager") and not case.name.startswith(("timm", "dinov2-hub"))
]


@pytest.mark.parametrize("case", EAGER, ids=lambda case: case.name)
def test_weights_are_transformers_own(case: Case) -> None:
    model, inputs = case.build()
    maps: list[Tensor] = []
    with torch.no_grad(), capture(model, lambda record: maps.append(record.weights)):
        out = model(**inputs, output_attentions=True)
    parts = out.values()
    towers = [part for part in parts if hasattr(part, "attentions")] or [out]
    fields = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
    own = [
        weights
        for tower in towers
        for field in fields
        for weights in (getattr(tower, field, None) or ())
        if weights is not None
    ]
    if not own:
        pytest.skip("this model gives no attentions at all")
    ours = [weights for weights in maps if any(weights.shape == other.shape for other in own)]
    assert len(ours) >= len(own)
    if case.name.startswith("granite") and "swa" in case.name:
        # These give away the map before their sink logit scales it.
        ours = [weights / weights.sum(dim=-1, keepdim=True) for weights in ours]
    for theirs in own:
        near = [
            float((theirs - weights).abs().max())
            for weights in ours
            if weights.shape == theirs.shape
        ]
        assert min(near) <= 1e-6


def _state(model: nn.Module) -> list:
    """Everything that a capture could leave on a model, in a form that can be compared.

    Python's own generator is left out: beartype, on in tests, draws from it.
    """
    kinds = [
        "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
        "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks", "_forward_hooks_with_kwargs",
        "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called",
    ]  # fmt: skip
    modules = [
        (name, type(m), m.training, sorted(m.__dict__), [len(getattr(m, kind)) for kind in kinds])
        for name, m in model.named_modules()
    ]
    held = [*model.named_parameters(), *model.named_buffers()]
    values = [
        (name, t.requires_grad, t.grad is None, t._version, sorted(t.__dict__), id(t))
        for name, t in held
    ]
    return [
        modules,
        values,
        list(model.state_dict()),
        torch.overrides._get_current_function_mode_stack(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.get_rng_state().tolist(),
        torch.is_grad_enabled(),
        torch._dynamo.eval_frame._stance,
        torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None,
        (F.scaled_dot_product_attention, F.softmax, F.multi_head_attention_forward, torch.matmul),
        [len(hooks) for hooks in vars(nn.modules.module).values() if isinstance(hooks, dict)],
    ]


class Stop(Exception):
    """Raised on purpose."""


@cases
def test_no_trace_is_left(case: Case) -> None:
    model, inputs = case.build()
    module = list(model.modules())[-1]

    def stop(*_: Any) -> None:
        raise Stop

    with torch.no_grad():
        run(model, inputs)  # caches that models fill themselves
        torch.manual_seed(5)
        before = _state(model)
        with capture(model, lambda record: None):
            run(model, inputs)
        assert _state(model) == before
        with contextlib.suppress(Stop), capture(model, stop):
            run(model, inputs)
            pytest.fail("the callback's error did not arrive")
        assert _state(model) == before
        hook = module.register_forward_pre_hook(stop)
        with contextlib.suppress(Stop, CaptureError), capture(model, lambda record: None):
            run(model, inputs)
        hook.remove()
        assert _state(model)[:2] == before[:2] and _state(model)[3:] == before[3:]


@pytest.mark.parametrize("name", ["timm-vit-eager", "timm-vit-sdpa", "llama-eager", "llama-sdpa",
                                  "t5-eager", "timm-cait-eager", "deberta-v2-eager",
                                  "nn-mha-weights"])  # fmt: skip
def test_nothing_is_kept(name: str) -> None:
    model, inputs = build(name)
    alive: list[weakref.ref] = []

    def on_record(record: AttentionRecord) -> None:
        # Of one layer, no map or query of another is left.
        assert sum(ref() is not None for ref in alive) <= 3, "an earlier layer's tensors live"
        given = (record.q, record.out, record.weights, record)
        alive.extend(weakref.ref(part) for part in given if part is not None)

    gc.collect()
    gc.disable()
    try:
        with torch.no_grad(), capture(model, on_record):
            run(model, inputs)
            assert not [ref for ref in alive if ref() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["timm-vit-sdpa", "timm-vit-eager", "vit-sdpa", "llama-sdpa",
    "llama-eager", "gpt2-eager", "bert-sdpa", "t5-eager", "gpt-oss-eager", "open_clip-custom",
    "nn-mha-weights", "nn-mha-plain"])  # fmt: skip
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    model, inputs = build(name)
    model = model.to(dtype)

    def cast(value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if floating else value

    if isinstance(inputs, dict):
        inputs = {key: cast(value) for key, value in inputs.items()}
    else:
        inputs = tuple(cast(value) for value in inputs)
    count = 0

    def on_record(record: AttentionRecord) -> None:
        nonlocal count
        count += 1
        assert record.faithful
        check(record, tolerance=2e-2)

    with torch.no_grad():
        plain = tensors(run(model, inputs))
        with capture(model, on_record):
            captured = tensors(run(model, inputs))
    assert count > 0
    for one, other in zip(plain, captured, strict=True):
        if name.startswith("nn-mha"):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-2)
        else:
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", NO_ATTENTION)
def test_no_attention_is_an_error_and_no_false_record(name: str) -> None:
    model, inputs = NO_ATTENTION[name]()
    records: list = []
    with pytest.raises(
        CaptureError, match=f"no softmax attention was seen in {type(model).__name__}"
    ):
        with torch.no_grad(), capture(model.eval(), records.append):
            run(model, inputs)
    assert records == []


def test_a_model_that_was_not_called_is_an_error() -> None:
    model, _ = build("timm-vit-sdpa")
    with pytest.raises(CaptureError, match="was not called"), capture(model, lambda record: None):
        pass


MUTATIONS = {
    "scale": lambda fields: fields.update(scale=fields["scale"] * 2),
    "mask": lambda fields: fields.update(mask=AttentionMask()),
    "value": lambda fields: fields.update(v=fields["v"].flip(2)),
    "heads": lambda fields: fields.update(v=fields["v"].flip(1)),
}


@pytest.mark.parametrize("wrong", MUTATIONS)
@pytest.mark.parametrize("name", ["gpt2-sdpa", "gpt2-eager", "llama-sdpa"])
def test_the_self_check_can_fail(name: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong record raises; where the model's own map is available it is only marked."""
    model, inputs = build(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # maps that differ from uniform
    original = CaptureMode._emit

    def mutated(self: CaptureMode, path: str, call: Intercepted, rescaled: None) -> None:
        MUTATIONS[wrong](call.fields)
        original(self, path, call, rescaled)

    monkeypatch.setattr(CaptureMode, "_emit", mutated)
    faithful: list[bool] = []

    def go(**options: Any) -> None:
        with torch.no_grad():
            with capture(model, lambda record: faithful.append(record.faithful), **options):
                run(model, inputs)

    if name.endswith("eager") and wrong in ("scale", "mask"):
        go()
        assert not any(faithful)
    else:
        with pytest.raises(CaptureError, match=r"\(layer 0\): the output recomputed"):
            go()
        go(check=False)
