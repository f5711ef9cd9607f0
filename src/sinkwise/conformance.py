"""Conformance: does what sinkwise captures from a model hold for that model?

    from sinkwise.conformance import check_model
    check_model(model, inputs)

As scikit-learn's `check_estimator`: a list of named checks, each of which can be run alone.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sinkwise.attention.reference import Attention, attention
from sinkwise.capturing import capture
from sinkwise.errors import InputError, SinkwiseError
from sinkwise.hosts.blocks import clean, find_blocks
from sinkwise.hosts.inputs import batch_size, call
from sinkwise.hosts.sites import attention_sites
from sinkwise.records import AttentionRecord, AttentionSite


class ConformanceError(SinkwiseError, AssertionError):
    """What was captured does not hold for the model."""


@dataclass(frozen=True)
class CheckResult:
    """One check of one model."""

    check: str
    status: Literal["passed", "failed", "skipped"]
    message: str = ""


@dataclass(eq=False)
class Sample:
    """A model, its inputs, and all that one captured forward pass gave."""

    model: nn.Module
    inputs: Any
    records: list[AttentionRecord]
    plain: Tensor
    """The model's first output without capture, and with it."""
    captured: Tensor
    module_outputs: dict[str, Tensor]
    sites: dict[str, AttentionSite]

    @property
    def tolerance(self) -> float:
        """Relative error allowed: 1e-4 in float32, 2e-2 in half precision."""
        return 2e-2 if self.plain.dtype.itemsize == 2 else 1e-4

    def again(self, record: AttentionRecord) -> Attention:
        """The call recomputed by the reference, in float64, from the record's own fields."""
        sink = None if record.sink_logit is None else record.sink_logit.double()
        return attention(
            record.q.double(),
            record.k.double(),
            record.v.double(),
            scale=record.scale,
            softcap=record.softcap,
            mask=record.mask,
            sink_logit=sink,
        )


class Skip(Exception):
    """A check that does not apply to a model, with the reason."""


def observe(model: nn.Module, inputs: Any) -> Sample:
    """Run the model twice, without and with capture, and keep everything."""
    records: list[AttentionRecord] = []
    outputs: dict[str, Tensor] = {}
    sites = attention_sites(model)
    plain = _first_tensor(_run(model, inputs))
    handles = []
    for name, module in model.named_modules():
        if clean(name) in sites:
            handles.append(module.register_forward_hook(_keep(outputs, clean(name))))
    try:
        with capture(model, records.append, sites=sites):
            captured = _first_tensor(_run(model, inputs))
    finally:
        for handle in handles:
            handle.remove()
    return Sample(model, inputs, records, plain, captured, outputs, sites)


def _keep(outputs: dict[str, Tensor], name: str) -> Callable[..., None]:
    def hook(module: nn.Module, given: tuple, result: Any) -> None:
        outputs.setdefault(name, _first_tensor(result))

    return hook


@torch.no_grad()
def _run(model: nn.Module, inputs: Any) -> Any:
    return call(model, inputs)


def _first_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    parts = value.values() if isinstance(value, dict) else value
    if isinstance(parts, str) or parts is None:
        raise InputError("the model's output holds no tensor")
    return next(_first_tensor(part) for part in parts if part is not None)


def _demand(condition: bool | Tensor, message: str) -> None:
    if not bool(condition):
        raise ConformanceError(message)


def _where(record: AttentionRecord) -> str:
    return f"{record.name or 'the model'} (layer {record.layer}, call {record.call})"


def check_output_is_unchanged(sample: Sample) -> None:
    """Capture does not change the model's output (1e-6: torch's fast paths are avoided)."""
    error = (sample.captured.double() - sample.plain.double()).abs().max()
    scale = sample.plain.double().abs().max().clamp_min(1.0)
    limit = 1e-6 if sample.plain.dtype.itemsize > 2 else 0.0
    _demand(error <= limit * scale, f"the output changed by {float(error):.3g} under capture")


def check_record_gives_the_output(sample: Sample) -> None:
    """softmax(cap(q k^T scale) + mask | sink) v, recomputed in float64, is the record's output."""
    for record in sample.records:
        seen = record.mask
        error = (sample.again(record).out - record.out.double()).abs()
        error = error[torch.isfinite(record.out)].max() if error.numel() else error.sum()
        scale = float(record.out.double().nan_to_num().abs().max().clamp_min(1.0))
        _demand(
            record.faithful and error <= sample.tolerance * scale,
            f"{_where(record)}: recomputed output differs by {float(error):.3g} (mask {seen})",
        )


def check_shapes(sample: Sample) -> None:
    """q, k, v, out, lse and weights agree in batch, heads and lengths."""
    for record in sample.records:
        batch, heads, queries, width = record.q.shape
        _, kv_heads, keys, value_dim = record.v.shape
        where = _where(record)
        _demand(record.k.shape == (batch, kv_heads, keys, width), f"{where}: k {record.k.shape}")
        _demand(record.v.shape[0] == batch, f"{where}: v {record.v.shape}")
        _demand(heads % kv_heads == 0, f"{where}: {heads} heads on {kv_heads} key/value heads")
        expected = (batch, heads, queries, value_dim)
        _demand(record.out.shape == expected, f"{where}: out {record.out.shape} is not {expected}")
        if record.lse is not None:
            _demand(record.lse.shape == (batch, heads, queries), f"{where}: lse {record.lse.shape}")
        if record.weights is not None:
            expected = (batch, heads, queries, keys)
            _demand(record.weights.shape == expected, f"{where}: weights {record.weights.shape}")


def check_probabilities(sample: Sample) -> None:
    """Weights are at least 0 and sum to 1 with the sink logit's share; lse is the scores' own."""
    for record in sample.records:
        again = sample.again(record)
        weights = again.weights if record.weights is None else record.weights.double()
        total = weights.sum(dim=-1)
        if record.sink_logit is not None:
            sink = record.sink_logit.double().expand_as(again.lse)
            total = total + torch.exp(sink - again.lse)
        sees = again.lse > -torch.inf
        where = _where(record)
        error = ((total - 1.0).abs() * sees).max()
        _demand(weights.min() >= 0, f"{where}: a weight is {float(weights.min()):.3g}")
        _demand(error <= sample.tolerance, f"{where}: weights miss 1 by {float(error):.3g}")
        if record.lse is not None:
            visible = sees & again.weights.sum(dim=-1).gt(0)
            error = ((record.lse.double() - again.lse).abs() * visible).nan_to_num().max()
            _demand(error <= 10 * sample.tolerance, f"{where}: lse is off by {float(error):.3g}")


def check_causality(sample: Sample) -> None:
    """Where later tokens change nothing before them, no weight lies above the diagonal."""
    changed = _with_another_last_token(sample.inputs)
    if changed is None:
        raise Skip("the inputs are no token ids")
    other = observe(sample.model, changed)
    for one, two in zip(sample.records, other.records, strict=True):
        if one.q.shape[2] != one.k.shape[2] or one.q.shape != two.q.shape:
            continue
        before, after = one.out[:, :, :-1], two.out[:, :, :-1]
        if not torch.equal(before, after):
            continue
        weights = one.weights if one.weights is not None else sample.again(one).weights
        above = torch.ones(one.q.shape[2], one.k.shape[2], dtype=torch.bool).triu(1)
        top = weights[..., above.to(weights.device)].abs().max()
        _demand(top == 0, f"{_where(one)}: a weight above the diagonal is {float(top):.3g}")


def _with_another_last_token(inputs: Any) -> Any:
    if isinstance(inputs, dict) and "input_ids" in inputs and len(inputs) <= 2:
        ids = inputs["input_ids"].clone()
        ids[:, -1] = torch.where(ids[:, -1] == 5, 6, 5)
        return {**inputs, "input_ids": ids}
    return None


def check_values_per_kv_head(sample: Sample) -> None:
    """Grouped heads keep one key and value head a group, as the projections have them."""
    for record in sample.records:
        site = record.site
        if site is None or site.v is None:
            continue
        _demand(
            record.v.shape[1] == site.v.shape[0],
            f"{_where(record)}: {record.v.shape[1]} value heads, the projection has "
            f"{site.v.shape[0]}",
        )


def check_output_projection(sample: Sample) -> None:
    """sum_h W_O^h out_h is the attention module's output, up to its bias."""
    checked = 0
    for record in sample.records:
        own = sample.module_outputs.get(record.name)
        site = record.site
        if site is None or site.o is None or own is None or record.call:
            continue
        update = torch.einsum("hov,bhqv->bqo", site.o.double(), record.out.double())
        if own.dim() != 3 or own.shape != update.shape or _projects_elsewhere(sample, record.name):
            continue
        difference = own.double() - update
        # A bias is the same for every token.
        error = (difference - difference[:1, :1]).abs().nan_to_num().max()
        scale = float(own.double().nan_to_num().abs().max().clamp_min(1.0))
        _demand(
            error <= sample.tolerance * scale,
            f"{_where(record)}: W_O per head gives another output (off by {float(error):.3g})",
        )
        checked += 1
    if not checked:
        raise Skip("no attention module returns its projected output")


def _projects_elsewhere(sample: Sample, name: str) -> bool:
    """BERT's self-attention returns the heads' outputs; its sibling projects them."""
    module = {clean(n): m for n, m in sample.model.named_modules()}[name]
    outputs = ("o_proj", "out_proj", "dense", "out_lin", "proj", "c_proj")
    return not any(hasattr(module, output) for output in outputs)


def check_layers(sample: Sample) -> None:
    """Every record names a module of the model; a block's records carry the block's number."""
    names = {clean(name) for name, _ in sample.model.named_modules()}
    blocks = find_blocks(sample.model)
    for record in sample.records:
        _demand(record.name in names, f"{record.name!r} is no module of the model")
        held = [b for b in blocks if (record.name + ".").startswith(b.name + ".")]
        if held and held[-1].siblings > 1:
            _demand(
                record.layer == held[-1].layer,
                f"{_where(record)}: its block is number {held[-1].layer}",
            )
    calls = [(record.layer, record.name, record.call) for record in sample.records]
    _demand(len(set(calls)) == len(calls), "two records carry the same layer, name and call")


def check_no_trace(sample: Sample) -> None:
    """Hooks, parameters, attributes and output bits are the same after a capture."""
    _leaves_no_trace(sample, fail=False)


def check_no_trace_after_an_exception(sample: Sample) -> None:
    """The same when the callback raises in the middle of a forward pass."""
    _leaves_no_trace(sample, fail=True)


class _Stop(Exception):
    pass


def _leaves_no_trace(sample: Sample, fail: bool) -> None:
    model = sample.model
    before, plain = state_of(model), _first_tensor(_run(model, sample.inputs))

    def on_record(record: AttentionRecord) -> None:
        if fail:
            raise _Stop

    try:
        with capture(model, on_record):
            _run(model, sample.inputs)
    except _Stop:
        pass
    after = state_of(model)
    for key, value in before.items():
        _demand(after[key] == value, f"{key} differs after a capture")
    again = _first_tensor(_run(model, sample.inputs))
    same = torch.equal(plain.nan_to_num(), again.nan_to_num())
    _demand(same, "the output's bits differ after a capture")


def state_of(model: nn.Module) -> dict[str, Any]:
    """What a capture may not change, by name."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        "hooks": [[list(getattr(m, name)) for name in hooks] for m in model.modules()],
        "attributes": [sorted(m.__dict__) for m in model.modules()],
        "state_dict": {k: v.data_ptr() for k, v in model.state_dict().items()},
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "training": [m.training for m in model.modules()],
        "compiled": [m._compiled_call_impl is None for m in model.modules()],
        "torch function modes": torch._C._len_torch_function_stack(),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "grad mode": torch.is_grad_enabled(),
    }


CHECKS: tuple[Callable[[Sample], None], ...] = (
    check_output_is_unchanged,
    check_record_gives_the_output,
    check_shapes,
    check_probabilities,
    check_causality,
    check_values_per_kv_head,
    check_output_projection,
    check_layers,
    check_no_trace,
    check_no_trace_after_an_exception,
)
"""All checks, in the order in which they run."""


def check_model(
    model: nn.Module,
    inputs: Any,
    *,
    on_fail: Literal["raise", "report"] = "raise",
    checks: tuple[Callable[[Sample], None], ...] = CHECKS,
) -> list[CheckResult]:
    """Check what sinkwise captures from `model`, run on `inputs` (a tensor, tuple or dict).

    The model runs several times in eval mode and keeps every record of a forward pass: use small
    inputs. Raises ConformanceError at the first failed check, or with `on_fail="report"` returns
    one result a check.
    """
    if on_fail not in ("raise", "report"):
        raise InputError(f"on_fail={on_fail!r}; it is 'raise' or 'report'")
    batch_size(inputs)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    results = []
    try:
        sample = observe(model, copy.copy(inputs))
        for check in checks:
            name = check.__name__.removeprefix("check_")
            try:
                check(sample)
                results.append(CheckResult(name, "passed"))
            except Skip as reason:
                results.append(CheckResult(name, "skipped", str(reason)))
            except ConformanceError as error:
                if on_fail == "raise":
                    raise ConformanceError(f"{type(model).__name__}: {name}: {error}") from error
                results.append(CheckResult(name, "failed", str(error)))
    finally:
        for module, mode in modes:
            module.training = mode
    return results
