"""Checks of the records themselves: does each tell what the model computed?"""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sinkwise.conformance.sample import (
    ConformanceError,
    Projection,
    Sample,
    Skip,
    demand,
    observe,
    same_bits,
    where,
)
from sinkwise.core.records import AttentionRecord
from sinkwise.hosts.blocks import LayerIndex, clean, find_blocks


def check_output_is_unchanged(sample: Sample) -> None:
    """Capture changes no bit of the model's output, but for torch's fast paths, which it avoids."""
    if same_bits(sample.plain, sample.captured):
        return
    pairs = zip(sample.plain, sample.captured, strict=False)
    errors = [float((a.double() - b.double()).abs().max()) for a, b in pairs if a.shape == b.shape]
    raise ConformanceError(f"the output changed by {max(errors, default=torch.inf):.3g}")


def check_record_gives_the_output(sample: Sample) -> str:
    """softmax(cap(q k^T scale) + mask | sink) v, recomputed in float64, is the record's output.

    Where a record says that its fields are not the whole story (`faithful=False`), its weights
    times v must be.
    """
    unfaithful = []
    for record in sample.records:
        again = sample.again(record)
        if record.faithful:
            out, sees = again.out, _sees(record, again.weights)
        else:
            demand(record.weights is not None, f"{where(record)}: unfaithful, and no weights")
            assert record.weights is not None
            out = record.weights.double() @ record.v.double().repeat_interleave(record.group, 1)
            sees = torch.ones_like(record.lse if record.lse is not None else out[..., 0]).bool()
            unfaithful.append(record.name)
        own = record.out.double()
        sees = sees & own.isfinite().all(dim=-1)
        error = _largest((out - own).abs()[sees])
        limit = sample.tolerance(record) * _largest(own[sees].abs())
        limit += torch.finfo(record.out.dtype).eps * _largest(record.v.double().nan_to_num().abs())
        demand(
            error <= limit,
            f"{where(record)}: the recomputed output differs by {error:.3g} (allowed {limit:.3g})",
        )
    names = ", ".join(dict.fromkeys(unfaithful))
    return f"told by their weights alone: {names}" if names else ""


def _largest(values: Tensor) -> float:
    return float(values.max()) if values.numel() else 0.0


def _sees(record: AttentionRecord, weights: Tensor) -> Tensor:
    """Queries that see a key: kernels differ in what they answer to the others."""
    return weights.sum(dim=-1) > 0 if record.sink_logit is None else weights.isfinite().all(dim=-1)


def check_shapes(sample: Sample) -> None:
    """q, k, v, out, lse, weights and mask agree in batch, heads and lengths."""
    demand(bool(sample.records), "there is no record")
    for record in sample.records:
        batch, heads, queries, width = record.q.shape
        _, kv_heads, keys, value_dim = record.v.shape
        expected: dict[str, tuple[int, ...]] = {
            "k": (batch, kv_heads, keys, width),
            "v": (batch, kv_heads, keys, value_dim),
            "out": (batch, heads, queries, value_dim),
            "lse": (batch, heads, queries),
            "weights": (batch, heads, queries, keys),
        }
        for name, shape in expected.items():
            tensor = getattr(record, name)
            given = None if tensor is None else tuple(tensor.shape)
            demand(given in (None, shape), f"{where(record)}: {name} is {given}, not {shape}")
        for name in ("allowed", "additive"):
            tensor = getattr(record.mask, name)
            if tensor is not None:
                full = zip(tensor.shape, (batch, heads, queries, keys), strict=True)
                fits = all(size in (1, wanted) for size, wanted in full)
                demand(fits, f"{where(record)}: {name} is {tuple(tensor.shape)}")
        demand(
            heads % kv_heads == 0,
            f"{where(record)}: {heads} query heads on {kv_heads} key/value heads",
        )
        if record.site is not None and record.site.q is not None:
            known = record.site.q.shape[0]
            demand(heads == known, f"{where(record)}: {heads} heads, the projection has {known}")


def check_probabilities(sample: Sample) -> None:
    """Weights are at least 0 and sum to 1 with the sink logit's share; lse is the scores' own.

    A map that the model changed after its softmax is none of probabilities and is left out.
    """
    for record in sample.records:
        if not record.faithful:
            continue
        again = sample.again(record)
        weights = again.weights if record.weights is None else record.weights.double()
        total = weights.sum(dim=-1)
        if record.sink_logit is not None:
            sink = record.sink_logit.detach().double().expand_as(again.lse)
            total = total + torch.exp(sink - again.lse)
        sees = _sees(record, again.weights)
        error = _largest((total - 1.0).abs()[sees])
        lowest = float(weights.min())
        demand(lowest >= 0, f"{where(record)}: a weight is {lowest:.3g}")
        demand(error <= sample.tolerance(record), f"{where(record)}: weights miss 1 by {error:.3g}")
        if record.lse is not None:
            error = _largest((record.lse.double() - again.lse).abs()[sees])
            limit = 10 * sample.tolerance(record)
            demand(error <= limit, f"{where(record)}: lse is off by {error:.3g}")


def check_causality(sample: Sample) -> str:
    """Where a later token changes nothing before it, no weight lies above the diagonal.

    The last token of each sequence is changed in turn. A call of as many queries as keys, whose
    last key changed and whose earlier outputs did not, is causal.
    """
    causal: set[int] = set()
    tried = False
    for inputs in _with_another_last_token(sample.inputs):
        tried = True
        other = observe(sample.model, inputs)
        pairs = enumerate(zip(sample.records, other.records, strict=True))
        causal |= {index for index, (one, two) in pairs if _looks_back_only(sample, one, two)}
    if not tried:
        raise Skip("the inputs hold no sequence")
    for index in sorted(causal):
        record = sample.records[index]
        again = sample.again(record).weights
        for weights in (record.weights, again if record.faithful else None):
            if weights is None:
                continue
            # A padded query may see nothing, and then anything.
            top = _largest(weights.double().triu(1)[_sees(record, again)].abs())
            demand(top == 0, f"{where(record)}: a weight above the diagonal is {top:.3g}")
    return f"{len(causal)} of {len(sample.records)} calls are causal"


def _looks_back_only(sample: Sample, one: AttentionRecord, two: AttentionRecord) -> bool:
    if one.q.shape != two.q.shape or one.k.shape != two.k.shape or one.q.shape[2] < 2:
        return False
    if one.q.shape[2] != one.k.shape[2]:
        return False
    changed = (one.k != two.k).any(dim=-1).any(dim=1)  # batch key
    last = changed[:, -1] & ~changed[:, :-1].any(dim=-1)
    again = sample.again(one).weights
    weights = again if one.weights is None else one.weights
    last &= (weights[:, :, -1, -1] > 0).all(dim=1)  # a padded key says nothing
    sees = _sees(one, again)[last][:, :, :-1]  # nor does a padded query
    before, after = (record.out[last][:, :, :-1].double()[sees] for record in (one, two))
    if not before.numel():
        return False
    return _largest((before - after).abs()) <= 1e-6 * _largest(before.abs())


def _with_another_last_token(inputs: Any) -> Iterator[Any]:
    """The inputs with the last token of one of their sequences changed, for each in turn."""
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    items = inputs.items() if isinstance(inputs, dict) else enumerate(inputs)
    seen: set[int] = set()
    for name, value in items:
        if not isinstance(value, Tensor) or id(value) in seen or "mask" in str(name):
            continue
        seen.add(id(value))
        other = _changed(value)
        if other is None:
            continue
        if isinstance(inputs, dict):
            yield {key: other if given is value else given for key, given in inputs.items()}
        else:
            yield tuple(other if given is value else given for given in inputs)


def _changed(value: Tensor) -> Tensor | None:
    """Token ids or embedded tokens, the last one other than it was; None for anything else."""
    if value.dim() == 2 and value.dtype == torch.int64 and int(value.max()) > 1:
        ids = value.clone()
        ids[:, -1] = torch.where(ids[:, -1] == 5, 6, 5)
        return ids
    if value.dim() == 3 and value.is_floating_point():
        tokens = value.clone()
        tokens[:, -1] = tokens[:, -1].flip(-1) + 0.5
        return tokens
    return None


def check_values_per_kv_head(sample: Sample) -> None:
    """Grouped heads keep one key and value head a group, as the projections have them."""
    for record in sample.records:
        site = record.site
        if site is not None and site.v is not None:
            heads, known = record.v.shape[1], site.v.shape[0]
            demand(
                heads == known,
                f"{where(record)}: {heads} value heads, the projection has {known}",
            )
        elif record.v.shape[1] > 1 and record.group == 1:
            pairs = [(t[:, ::2], t[:, 1::2]) for t in (record.k, record.v)]
            twice = all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)
            demand(not twice, f"{where(record)}: every key/value head is there twice")


def check_output_projection(sample: Sample) -> str:
    """sum_h W_O^h out_h plus the bias is what the output projection gives.

    Where a gate lies between the heads and the projection, it is found by what the projection is
    given, must lie between 0 and 1, and is applied.
    """
    checked: set[str] = set()
    for record in sample.records:
        runs = sample.projections.get(record.name, [])
        site = record.site
        if site is None or site.o is None or len(runs) <= record.call:
            continue
        done = runs[record.call]
        batch, heads, queries, width = record.out.shape
        tokens = done.result.reshape(-1, done.result.shape[-1])
        if tokens.shape[0] != batch * queries:
            continue
        tokens = tokens.reshape(batch, queries, -1).double()
        demand(
            site.o.shape == (heads, tokens.shape[-1], width),
            f"{where(record)}: W_O per head is {tuple(site.o.shape)}",
        )
        update = torch.einsum("hov,bhqv->bqo", site.o.double(), _projected(sample, record, done))
        if done.bias is not None:
            update = update + done.bias.double()
        difference = tokens - update
        if site.source != "layout":  # the bias is not known: the same for every token
            difference = difference - difference[:, :1]
        error = _largest(difference.abs().nan_to_num())
        limit = sample.tolerance(record) * max(1.0, _largest(tokens.abs().nan_to_num()))
        demand(
            error <= limit,
            f"{where(record)}: W_O per head gives another output (off by {error:.3g})",
        )
        checked.add(record.name)
    if not checked:
        raise Skip("no attention module has an output projection that can be watched")
    names = {record.name for record in sample.records}
    return f"{len(checked)} of {len(names)} modules"


def _projected(sample: Sample, record: AttentionRecord, done: Projection) -> Tensor:
    """The heads as the projection got them: the record's, or those times a gate."""
    own = record.out.double()
    if done.given is None or done.given.numel() != own.numel():
        return own
    batch, heads, queries, width = own.shape
    given = done.given.reshape(batch, queries, heads, width).transpose(1, 2).double()
    rounding = sample.tolerance(record) * _largest(own.abs().nan_to_num())
    if _largest((given - own).abs().nan_to_num()) <= rounding:
        return own
    gated = (given * own >= -(rounding**2)) & (given.abs() <= own.abs() + rounding)
    demand(gated.all(), f"{where(record)}: the projection is given something else than the heads")
    return given


def check_layers(sample: Sample) -> None:
    """Every record names a module of the model and carries its block's number.

    Blocks of one list are numbered as the list is, those without attention included; a block that
    runs many times counts once for each run. No two records carry the same layer, name and call.
    """
    names = {clean(name) for name, _ in sample.model.named_modules()}
    index = LayerIndex(find_blocks(sample.model))
    first: dict[str, int] = {}
    for record in sample.records:
        demand(record.name in names, f"{record.name!r} is no module of the model")
        block = index.block(record.name)
        if block is None:
            continue
        parent, number = re.fullmatch(r"(.*?)\.?(\d+)", block.name).groups()  # type: ignore[union-attr]
        run = record.call if block.siblings == 1 else 0
        zero = first.setdefault(parent, block.layer - int(number))
        demand(
            record.layer == zero + int(number) + run,
            f"{where(record)}: its block is number {zero + int(number) + run}",
        )
    calls = [(record.layer, record.name, record.call) for record in sample.records]
    demand(len(set(calls)) == len(calls), "two records carry the same layer, name and call")
