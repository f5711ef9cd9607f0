"""A model run once plain and once captured: everything that the checks look at."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sinkwise.attention.reference import Attention, attention
from sinkwise.capturing.capture import Coverage, capture
from sinkwise.capturing.jacobian import measured_sites
from sinkwise.core.records import AttentionRecord, AttentionSite
from sinkwise.errors import InputError, SinkwiseError
from sinkwise.hosts.blocks import clean
from sinkwise.hosts.inputs import call
from sinkwise.hosts.sites import attention_sites


class ConformanceError(SinkwiseError, AssertionError):
    """What was captured does not hold for the model."""


class Skip(Exception):
    """A check that does not apply to a model, with the reason."""


class Projection(NamedTuple):
    """One run of an output projection."""

    given: Tensor | None
    """What it was given; None where it runs inside its attention module, unseen."""
    result: Tensor
    bias: Tensor | None


@dataclass(eq=False)
class Sample:
    """A model, its inputs, and all that one captured forward pass gave."""

    model: nn.Module
    inputs: Any
    records: list[AttentionRecord]
    coverage: Coverage
    plain: list[Tensor]
    """The model's outputs without capture, run as capture runs it: no fast path, no compiler."""
    captured: list[Tensor]
    sites: dict[str, AttentionSite]
    projections: dict[str, list[Projection]] = field(default_factory=dict)
    """Runs of each site's output projection, in order, by the site's name."""

    def tolerance(self, record: AttentionRecord) -> float:
        """Relative error allowed: 1e-4 in float32, 2e-2 in half precision."""
        return 2e-2 if record.out.dtype.itemsize == 2 else 1e-4

    @torch.no_grad()
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


def observe(model: nn.Module, inputs: Any) -> Sample:
    """Run the model once without and once with capture, and keep everything."""
    sites = attention_sites(model)
    with without_fast_paths():
        plain = run(model, inputs)
    records: list[AttentionRecord] = []
    with capture(model, records.append) as coverage:
        captured = run(model, inputs)
    missing = sorted({record.name for record in records} - set(sites) - {""})
    if missing:
        sites |= measured_sites(model, missing, inputs)
    projections: dict[str, list[Projection]] = {}
    handles = _watch_projections(model, sites, projections)
    try:
        with without_fast_paths():
            run(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    for record in records:
        record.site = sites.get(record.name)
    return Sample(model, inputs, records, coverage, plain, captured, sites, projections)


def run(model: nn.Module, inputs: Any) -> list[Tensor]:
    """All tensors of the model's answer."""
    with torch.no_grad():
        answer = list(tensors(call(model, inputs)))
    if not answer:
        raise InputError("the model's output holds no tensor")
    return answer


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in a nest of tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors(part)


@contextmanager
def without_fast_paths() -> Iterator[None]:
    """Run a model as capture does: without torch's fused encoder layer, and uncompiled."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        if "torch._dynamo" in sys.modules:
            with torch.compiler.set_stance("force_eager"):
                yield
        else:
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def _watch_projections(
    model: nn.Module, sites: dict[str, AttentionSite], found: dict[str, list[Projection]]
) -> list[Any]:
    """Hooks on the modules that hold W_O of each site; where none does, on the site's own module.

    The projection may lie in a sibling (BERT), and never runs as a module in
    `nn.MultiheadAttention`.
    """
    modules = {clean(name): module for name, module in model.named_modules()}
    holders = {
        weight.data_ptr(): module
        for module in modules.values()
        if isinstance(weight := getattr(module, "weight", None), nn.Parameter)
    }
    handles = []
    for name, site in sites.items():
        owner = modules[name]
        if site.o is None:
            continue
        holder = holders.get(site.o.untyped_storage().data_ptr())
        runs = found.setdefault(name, [])
        if site.source != "layout":
            handles.append(owner.register_forward_hook(_keep(runs, None, False)))
        elif isinstance(owner, nn.MultiheadAttention):
            turned = not owner.batch_first
            handles.append(
                owner.register_forward_hook(_keep(runs, owner.out_proj.bias, False, turned))
            )
        elif holder is not None:
            handles.append(holder.register_forward_hook(_keep(runs, holder.bias, True)))
    return handles


def _keep(
    runs: list[Projection], bias: Any, seen: bool, turned: bool = False
) -> Callable[..., None]:
    def hook(module: nn.Module, given: tuple, result: Any) -> None:
        added = None if bias is None else bias.detach()
        out = next(tensors(result))
        if turned and out.dim() == 3:
            out = out.transpose(0, 1)
        runs.append(Projection(given[0] if seen else None, out, added))

    return hook


def demand(condition: bool | Tensor, message: str) -> None:
    """Raise ConformanceError unless the condition holds."""
    if not bool(condition):
        raise ConformanceError(message)


def where(record: AttentionRecord) -> str:
    """The record's place, for messages."""
    return f"{record.name or 'the model'} (layer {record.layer}, call {record.call})"


def same_bits(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether two answers are equal to the bit (NaN is NaN)."""
    return len(one) == len(other) and all(
        torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(one, other, strict=True)
    )
