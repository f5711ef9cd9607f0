"""Checks of the records: does each agree with what the model computed?"""

import re

import torch

from sinkwise.conformance.comparing import largest, location, require, same_bits, sees_a_key
from sinkwise.conformance.errors import ConformanceError
from sinkwise.conformance.observation import Observation
from sinkwise.hosts.blocks import LayerIndex, clean, find_blocks


def check_output_is_unchanged(observed: Observation) -> None:
    """Capture changes no bit of the model's output, compared without torch's fast paths."""
    if same_bits(observed.plain, observed.captured):
        return
    pairs = zip(observed.plain, observed.captured, strict=False)
    errors = [float((a.double() - b.double()).abs().max()) for a, b in pairs if a.shape == b.shape]
    raise ConformanceError(f"capture changed the output by {max(errors, default=torch.inf):.3g}")


def check_record_gives_the_output(observed: Observation) -> str:
    r"""The fields of a record give its output, recomputed in float64.

    The output is $\operatorname{softmax}(\mathrm{cap}(q k^\top \cdot \mathrm{scale}) +
    \mathrm{mask})\, v$, with the sink logit in the denominator. If the fields of a record do not
    determine its map (`faithful=False`), its weights times v must be the output.
    """
    unfaithful = []
    for record in observed.records:
        again = observed.recomputed(record)
        if record.faithful:
            out, sees = again.out, sees_a_key(record, again.weights)
        else:
            require(
                record.weights is not None, f"{location(record)}: faithful=False, but no weights"
            )
            assert record.weights is not None
            out = record.weights.double() @ record.v.double().repeat_interleave(record.group, 1)
            sees = torch.ones_like(record.lse if record.lse is not None else out[..., 0]).bool()
            unfaithful.append(record.name)
        own = record.out.double()
        sees = sees & own.isfinite().all(dim=-1)
        error = largest((out - own).abs()[sees])
        limit = observed.tolerance(record) * largest(own[sees].abs())
        limit += torch.finfo(record.out.dtype).eps * largest(record.v.double().nan_to_num().abs())
        require(
            error <= limit,
            f"{location(record)}: the recomputed output differs by {error:.3g} > {limit:.3g}",
        )
    names = ", ".join(dict.fromkeys(unfaithful))
    return f"only the attention map gives the output of {names}" if names else ""


def check_shapes(observed: Observation) -> None:
    """q, k, v, out, lse, weights and mask agree in batch, heads and lengths."""
    require(bool(observed.records), "capture made no record")
    for record in observed.records:
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
            require(given in (None, shape), f"{location(record)}: {name} is {given}, not {shape}")
        for name in ("allowed", "additive"):
            tensor = getattr(record.mask, name)
            if tensor is not None:
                full = zip(tensor.shape, (batch, heads, queries, keys), strict=True)
                fits = all(size in (1, wanted) for size, wanted in full)
                given = tuple(tensor.shape)
                require(fits, f"{location(record)}: {name} is {given}, which does not broadcast")
        require(
            heads % kv_heads == 0,
            f"{location(record)}: {heads} query heads and {kv_heads} key/value heads do not divide",
        )
        if record.site is not None and record.site.q is not None:
            known = record.site.q.shape[0]
            require(
                heads == known, f"{location(record)}: {heads} heads, but the projection has {known}"
            )


def check_probabilities(observed: Observation) -> None:
    """Weights are at least 0 and sum to 1 with the sink's share; lse is that of the scores.

    Maps that the model changed after the softmax are no probabilities, and are not checked.
    """
    for record in observed.records:
        if not record.faithful:
            continue
        again = observed.recomputed(record)
        weights = again.weights if record.weights is None else record.weights.double()
        total = weights.sum(dim=-1)
        if record.sink_logit is not None:
            sink = record.sink_logit.detach().double().expand_as(again.lse)
            total = total + torch.exp(sink - again.lse)
        sees = sees_a_key(record, again.weights)
        error = largest((total - 1.0).abs()[sees])
        lowest = float(weights.min())
        require(lowest >= 0, f"{location(record)}: a weight is {lowest:.3g}")
        require(
            error <= observed.tolerance(record),
            f"{location(record)}: the sum of weights differs from 1 by {error:.3g}",
        )
        if record.lse is not None:
            error = largest((record.lse.double() - again.lse).abs()[sees])
            limit = 10 * observed.tolerance(record)
            require(error <= limit, f"{location(record)}: lse is off by {error:.3g}")


def check_layers(observed: Observation) -> None:
    """Every record has the path of a module of the model, and the number of its block.

    Blocks of one list are numbered as in the list, including those without attention. A block that
    runs several times counts once per run. No two records have the same layer, name and call.
    """
    names = {clean(name) for name, _ in observed.model.named_modules()}
    index = LayerIndex(find_blocks(observed.model))
    first: dict[str, int] = {}
    for record in observed.records:
        require(record.name in names, f"{record.name!r} is not a module of the model")
        block = index.block(record.name)
        if block is None:
            continue
        parent, number = re.fullmatch(r"(.*?)\.?(\d+)", block.name).groups()  # type: ignore[union-attr]
        run = record.call if block.siblings == 1 else 0
        zero = first.setdefault(parent, block.layer - int(number))
        require(
            record.layer == zero + int(number) + run,
            f"{location(record)}: its block has number {zero + int(number) + run}",
        )
    calls = [(record.layer, record.name, record.call) for record in observed.records]
    require(len(set(calls)) == len(calls), "two records have the same layer, name and call")
