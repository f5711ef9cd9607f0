"""Checks of the records against the model's weights: key/value heads and the output projection."""

import torch
from torch import Tensor

from sinkwise.conformance.comparing import largest, location, require
from sinkwise.conformance.errors import Skip
from sinkwise.conformance.observation import Observation
from sinkwise.conformance.output_projections import Projection
from sinkwise.core.records import AttentionRecord


def check_values_per_kv_head(observed: Observation) -> None:
    """Grouped heads have one key and value head per group, as in the projections."""
    for record in observed.records:
        site = record.site
        if site is not None and site.v is not None:
            heads, known = record.v.shape[1], site.v.shape[0]
            require(
                heads == known,
                f"{location(record)}: {heads} value heads, but the projection has {known}",
            )
        elif record.v.shape[1] > 1 and record.group == 1:
            pairs = [(t[:, ::2], t[:, 1::2]) for t in (record.k, record.v)]
            twice = all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)
            require(not twice, f"{location(record)}: every key/value head occurs twice")


def check_output_projection(observed: Observation) -> str:
    r"""The output of the projection is $\sum_h W_{O,h}\, \mathrm{out}_h$ plus its bias.

    A gate between the heads and the projection is inferred from the projection's input; its factors
    must be between 0 and 1.
    """
    checked: set[str] = set()
    for record in observed.records:
        calls = observed.projections.get(record.name, [])
        site = record.site
        if site is None or site.o is None or len(calls) <= record.call:
            continue
        done = calls[record.call]
        batch, heads, queries, width = record.out.shape
        tokens = done.output.reshape(-1, done.output.shape[-1])
        if tokens.shape[0] != batch * queries:
            continue
        tokens = tokens.reshape(batch, queries, -1).double()
        require(
            site.o.shape == (heads, tokens.shape[-1], width),
            f"{location(record)}: W_O per head, {tuple(site.o.shape)}, does not fit the output",
        )
        update = torch.einsum("hov,bhqv->bqo", site.o.double(), _projected(observed, record, done))
        if done.bias is not None:
            update = update + done.bias.double()
        difference = tokens - update
        if site.source != "layout":  # its bias is unknown, and the same for every token
            difference = difference - difference[:, :1]
        error = largest(difference.abs().nan_to_num())
        limit = observed.tolerance(record) * max(1.0, largest(tokens.abs().nan_to_num()))
        require(
            error <= limit,
            f"{location(record)}: W_O per head gives a different output (off by {error:.3g})",
        )
        checked.add(record.name)
    if not checked:
        raise Skip("no attention module has an output projection that a hook can observe")
    names = {record.name for record in observed.records}
    return f"{len(checked)} of {len(names)} modules"


def _projected(observed: Observation, record: AttentionRecord, done: Projection) -> Tensor:
    """The heads as the projection received them: the record's, or those times a gate."""
    own = record.out.double()
    if done.input is None or done.input.numel() != own.numel():
        return own
    batch, heads, queries, width = own.shape
    given = done.input.reshape(batch, queries, heads, width).transpose(1, 2).double()
    rounding = observed.tolerance(record) * largest(own.abs().nan_to_num())
    if largest((given - own).abs().nan_to_num()) <= rounding:
        return own
    gated = (given * own >= -(rounding**2)) & (given.abs() <= own.abs() + rounding)
    require(
        gated.all(),
        f"{location(record)}: the input of the projection is not the heads, gated or not",
    )
    return given
