"""A model run once plain and once captured: everything that the checks examine."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sinkwise.attention.reference import Attention, attention
from sinkwise.capturing.capture import Coverage, capture
from sinkwise.capturing.jacobian import measured_sites
from sinkwise.conformance.output_projections import Projection, observe_projections, tensors
from sinkwise.core.records import AttentionRecord, AttentionSite
from sinkwise.errors import InputError
from sinkwise.hosts.inputs import call
from sinkwise.hosts.sites import attention_sites


@dataclass(eq=False)
class Observation:
    """A model, its inputs, and everything from one captured forward pass."""

    model: nn.Module
    inputs: Any
    records: list[AttentionRecord]
    coverage: Coverage
    plain: list[Tensor]
    """Outputs without capture, but run as capture runs the model: no fast path, no compiler."""
    captured: list[Tensor]
    """Outputs with capture."""
    sites: dict[str, AttentionSite]
    projections: dict[str, list[Projection]] = field(default_factory=dict)
    """Calls of each site's output projection, in order, by the site's name."""

    def tolerance(self, record: AttentionRecord) -> float:
        """The relative error allowed: 1e-4 in float32, 2e-2 in half precision."""
        return 2e-2 if record.out.dtype.itemsize == 2 else 1e-4

    @torch.no_grad()
    def recomputed(self, record: AttentionRecord) -> Attention:
        """The call recomputed in float64 by the reference, from the record's own fields."""
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


def observe(model: nn.Module, inputs: Any) -> Observation:
    """Run the model without capture, with it, and with hooks on the output projections."""
    sites = attention_sites(model)
    with without_fast_paths():
        plain = outputs_of(model, inputs)
    records: list[AttentionRecord] = []
    with capture(model, records.append) as coverage:
        captured = outputs_of(model, inputs)
    missing = sorted({record.name for record in records} - set(sites) - {""})
    if missing:
        sites |= measured_sites(model, missing, inputs)
    projections: dict[str, list[Projection]] = {}
    handles = observe_projections(model, sites, projections)
    try:
        with without_fast_paths():
            outputs_of(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    for record in records:
        record.site = sites.get(record.name)
    return Observation(model, inputs, records, coverage, plain, captured, sites, projections)


def outputs_of(model: nn.Module, inputs: Any) -> list[Tensor]:
    """All tensors in the model's output. Raises InputError if there is none."""
    with torch.no_grad():
        found = list(tensors(call(model, inputs)))
    if not found:
        raise InputError(
            f"{type(model).__name__} returned no tensor; give a model that returns at least one"
        )
    return found


@contextmanager
def without_fast_paths() -> Iterator[None]:
    """Inside, models run as under capture: without torch's fused encoder layer, and uncompiled."""
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
