"""The steps of a generation joined: one record per module over the whole sequence.

steps = Steps()
with capture(model, steps.add):
    model.generate(...)
for record in steps.records(): ...
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sinkwise.attention.mask import is_hidden, visible_tile
from sinkwise.capturing import joining
from sinkwise.core.records import OPEN, AttentionMask, AttentionRecord
from sinkwise.errors import InputError
from sinkwise.interception.mask_reader import recognised


@dataclass(frozen=True, eq=False)
class _Step:
    """One step without the cache that it read."""

    record: AttentionRecord
    """Its keys and values are only the new ones."""
    base: int
    """Position, in the whole sequence, of the first key of the step's cache."""
    keys: int
    """Keys in the step's cache, the new ones included."""
    weights: Tensor | None
    """Its map, kept where the other fields do not determine it."""


@dataclass(eq=False)
class ModuleSteps:
    """The records of one module over the steps of a generation, each with its own keys.

    A step's queries follow those of the step before, whatever the length of its cache, and its new
    keys are those at their positions. Keys that a sliding window has dropped since are kept from
    the step in which they were new. Positions count the tokens of the sequence, padding included.
    """

    _steps: list[_Step] = field(default_factory=list)
    _k: list[Tensor] = field(default_factory=list)
    _v: list[Tensor] = field(default_factory=list)
    _length: int = 0
    _first: tuple[Tensor, Tensor] | None = None
    """Keys and values of the first step; kept on where all steps attend to the same ones."""
    _is_cross_attention: bool = False

    def add(self, record: AttentionRecord) -> None:
        """Add a step's record; what is kept of it is copied.

        Raises InputError where the step's cache does not hold the keys of the steps before it, in
        order (reordered beams, evicted or re-rotated keys): no single record describes such steps.
        """
        queries, keys = record.q.shape[2], record.k.shape[2]
        cached = record.mask.offset
        weights = None if record.faithful else _copy(record.weights)
        if not self._steps:
            self._first = record.k.clone(), record.v.clone()
            self._length = cached
            self._k, self._v = [record.k[:, :, :cached].clone()], [record.v[:, :, :cached].clone()]
        elif len(self._steps) == 1:
            assert self._first is not None
            # In cross-attention every step attends to the same keys.
            self._is_cross_attention = _same(self._first[0], record.k)
            if not self._is_cross_attention:
                self._first = None
        if self._is_cross_attention:
            assert self._first is not None
            if not _same(self._first[0], record.k):
                raise InputError(f"{record.name}: cross-attention changed its keys between steps")
            self._steps.append(_Step(_without_cache(record, slice(0, 0)), 0, keys, weights))
            return
        base = self._length - cached
        past = torch.cat(self._k, dim=2)[:, :, max(base, 0) :]
        if base < 0 or not _same(past, record.k[:, :, :cached]):
            raise InputError(
                f"{record.name}: the cache of step {len(self._steps)} does not hold the keys of "
                "the steps before it (evicted, rotated or reordered), so that no single record "
                "describes all steps"
            )
        step = _Step(_without_cache(record, slice(cached, cached + queries)), base, keys, weights)
        self._steps.append(step)
        self._k = [torch.cat(self._k, dim=2), step.record.k]
        self._v = [torch.cat(self._v, dim=2), step.record.v]
        self._length += queries

    def joined(self) -> AttentionRecord:
        """One record over all steps: queries and outputs one after the other, all keys, one mask.

        The mask is causal (with an `offset` where the first step already found keys in its cache)
        and has the sliding window, where the steps' masks are; else it lists every key that a step
        could see. Raises InputError where no step was added, or steps differ in scale or softcap.
        """
        if not self._steps:
            raise InputError("no step was added: pass this object's `add` to capture")
        records = [step.record for step in self._steps]
        one = records[0]
        if any((r.scale, r.softcap) != (one.scale, one.softcap) for r in records):
            raise InputError(f"{one.name}: scale or softcap differ between steps")
        if self._first is not None and (self._is_cross_attention or len(self._steps) == 1):
            k, v = self._first
        else:
            k, v = torch.cat(self._k, dim=2), torch.cat(self._v, dim=2)
        return AttentionRecord(
            layer=one.layer,
            name=one.name,
            call=one.call,
            q=torch.cat([r.q for r in records], dim=2),
            k=k,
            v=v,
            out=torch.cat([r.out for r in records], dim=2),
            scale=one.scale,
            mask=self._mask(k.shape[2]),
            softcap=one.softcap,
            sink_logit=joining.concatenated_sinks(records),
            lse=joining.concatenated([r.lse for r in records], 2),
            weights=self._weights(k.shape[2]),
            faithful=all(r.faithful for r in records),
            residual=joining.concatenated([r.residual for r in records], 1),
            site=one.site,
        )

    def _weights(self, total: int) -> Tensor | None:
        """The whole map, where no step's other fields determine its map."""
        parts = [
            joining.among_all_keys(step.weights, step.base, total, 0.0)
            for step in self._steps
            if step.weights is not None
        ]
        return joining.concatenated_maps(parts) if len(parts) == len(self._steps) else None

    def _mask(self, total: int) -> AttentionMask:
        """Which of all keys each query could see, and what was added to its scores."""
        if len(self._steps) == 1:
            return self._steps[0].record.mask
        visible, bias = [], []
        for step in self._steps:
            record = step.record
            queries, device = record.q.shape[2], record.q.device
            mask = record.mask
            seen = visible_tile(mask, range(queries), range(step.keys), device)
            shape = (*seen.shape[:2], queries, step.keys)
            visible.append(joining.among_all_keys(seen.expand(shape), step.base, total, False))
            added = torch.zeros(1, 1, 1, 1, device=device)
            if mask.additive is not None:
                added = mask.additive.masked_fill(is_hidden(mask.additive), 0.0).float()
            shape = (*added.shape[:2], queries, step.keys)
            bias.append(joining.among_all_keys(added.expand(shape), step.base, total, 0.0))
        allowed, added = joining.concatenated_maps(visible), joining.concatenated_maps(bias)
        if bool(added.any()):
            mask = AttentionMask(additive=torch.where(allowed, added, -torch.inf))
        elif bool(allowed.all()):
            return OPEN
        else:
            mask = AttentionMask(allowed=allowed)
        return mask if self._is_cross_attention else recognised(mask, allowed.shape[2], total)


class Steps:
    """A callback for `capture` that joins the steps of every module."""

    def __init__(self) -> None:
        self._modules: dict[tuple[int, str, int], ModuleSteps] = {}

    def add(self, record: AttentionRecord) -> None:
        """Add a record to those of its module. Raises InputError as `ModuleSteps.add` does."""
        key = (record.layer, record.name, record.call)
        self._modules.setdefault(key, ModuleSteps()).add(record)

    def records(self) -> list[AttentionRecord]:
        """One record per module, in the order in which the modules were first called."""
        return [steps.joined() for steps in self._modules.values()]


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _without_cache(record: AttentionRecord, new: slice) -> AttentionRecord:
    """A copy with the new keys only. It shares no memory: caches are overwritten in place."""
    return replace(
        record,
        q=record.q.detach().clone(),
        k=record.k[:, :, new].detach().clone(),
        v=record.v[:, :, new].detach().clone(),
        out=record.out.detach().clone(),
        lse=_copy(record.lse),
        residual=_copy(record.residual),
        weights=None,
    )
