"""Steps of a generation joined: one record of each module over the whole sequence.

steps = Steps()
with capture(model, steps.add):
    model.generate(...)
for record in steps.records(): ...
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sinkwise.attention.mask import is_hidden, visible_tile
from sinkwise.core.records import OPEN, AttentionMask, AttentionRecord
from sinkwise.errors import InputError
from sinkwise.interception.mask_reader import recognised


@dataclass(frozen=True, eq=False)
class _Step:
    """What a step says of its queries, without its cache."""

    record: AttentionRecord
    """Its keys and values are only those that are new."""
    base: int
    """Position, in the whole sequence, of the first key of the step's cache."""
    keys: int
    weights: Tensor | None
    """Its map, kept where nothing else tells it."""


@dataclass(eq=False)
class RaggedRecord:
    """The records of one module over the steps of a generation, each with its own keys.

    A step's queries stand where the step before ended, whatever the length of its cache, and its
    new keys are those at their positions; keys that a sliding window had dropped are kept from the
    step in which they were new. Positions are places in the (padded) sequence.
    """

    _steps: list[_Step] = field(default_factory=list)
    _k: list[Tensor] = field(default_factory=list)
    _v: list[Tensor] = field(default_factory=list)
    _length: int = 0
    _whole: tuple[Tensor, Tensor] | None = None
    """All keys and values of the first step, until the second says whether they are its own."""
    _crossed: bool = False

    def add(self, record: AttentionRecord) -> None:
        """Take a step's record; what is kept of it is copied.

        Raises InputError where the step's cache does not hold the keys of the steps before it, in
        order (beams that were reordered, evicted or rotated keys): no single record is true then.
        """
        queries, keys = record.q.shape[2], record.k.shape[2]
        first = record.mask.offset
        weights = None if record.faithful else _kept(record.weights)
        if not self._steps:
            self._whole = record.k.clone(), record.v.clone()
            self._length = first
            self._k, self._v = [record.k[:, :, :first].clone()], [record.v[:, :, :first].clone()]
        elif len(self._steps) == 1:
            assert self._whole is not None
            known = self._whole[0]
            # Every step of cross-attention reads the same keys.
            self._crossed = known.shape == record.k.shape and torch.equal(known, record.k)
            if not self._crossed:
                self._whole = None
        if self._crossed:
            assert self._whole is not None
            if not _same(self._whole[0], record.k):
                raise InputError(f"{record.name}: cross-attention changed its keys between steps")
            self._steps.append(_Step(_copy(record, slice(0, 0)), 0, keys, weights))
            return
        base = self._length - first
        past = torch.cat(self._k, dim=2)[:, :, max(base, 0) :]
        if base < 0 or not _same(past, record.k[:, :, :first]):
            raise InputError(
                f"{record.name}: the cache of step {len(self._steps)} does not hold the keys of "
                "the steps before it (evicted, rotated or reordered), so that no single record "
                "tells them all"
            )
        new = slice(first, first + queries)
        self._steps.append(_Step(_copy(record, new), base, keys, weights))
        self._k, self._v = [torch.cat(self._k, dim=2)], [torch.cat(self._v, dim=2)]
        self._k.append(self._steps[-1].record.k)
        self._v.append(self._steps[-1].record.v)
        self._length += queries

    def joined(self) -> AttentionRecord:
        """One record over all steps: queries and outputs one after the other, all keys, one mask.

        The mask is causal (from `offset` on, where the first step found keys in its cache already),
        with the sliding window where there is one, and else tells each key that a step could see.
        """
        if not self._steps:
            raise InputError("no step was added; give capture this record's `add`")
        records = [step.record for step in self._steps]
        one = records[0]
        if any((r.scale, r.softcap) != (one.scale, one.softcap) for r in records):
            raise InputError(f"{one.name}: scale or softcap differ between steps")
        if self._whole is not None and (self._crossed or len(self._steps) == 1):
            k, v = self._whole
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
            sink_logit=_joined_sinks(records),
            lse=_joined([r.lse for r in records], 2),
            weights=self._weights(k.shape[2]),
            faithful=all(r.faithful for r in records),
            residual=_joined([r.residual for r in records], 1),
            site=one.site,
        )

    def _weights(self, total: int) -> Tensor | None:
        """The whole map, where the steps are told by their maps alone."""
        parts = [
            _placed(step.weights, step.base, total, 0.0)
            for step in self._steps
            if step.weights is not None
        ]
        return _stacked(parts) if len(parts) == len(self._steps) else None

    def _mask(self, total: int) -> AttentionMask:
        """What each query could see of all keys."""
        if len(self._steps) == 1:
            return self._steps[0].record.mask
        visible, bias = [], []
        for step in self._steps:
            record = step.record
            queries, device = record.q.shape[2], record.q.device
            mask = record.mask
            seen = visible_tile(mask, range(queries), range(step.keys), device)
            shape = (*seen.shape[:2], queries, step.keys)
            visible.append(_placed(seen.expand(shape), step.base, total, False))
            added = torch.zeros(1, 1, 1, 1, device=device)
            if mask.additive is not None:
                added = mask.additive.masked_fill(is_hidden(mask.additive), 0.0).float()
            shape = (*added.shape[:2], queries, step.keys)
            bias.append(_placed(added.expand(shape), step.base, total, 0.0))
        allowed, added = _stacked(visible), _stacked(bias)
        if bool(added.any()):
            mask = AttentionMask(additive=torch.where(allowed, added, -torch.inf))
        elif bool(allowed.all()):
            return OPEN
        else:
            mask = AttentionMask(allowed=allowed)
        return mask if self._crossed else recognised(mask, allowed.shape[2], total)


class Steps:
    """A callback for `capture` that joins the steps of every module."""

    def __init__(self) -> None:
        self._modules: dict[tuple[int, str, int], RaggedRecord] = {}

    def add(self, record: AttentionRecord) -> None:
        """Take a record to the others of its module."""
        key = (record.layer, record.name, record.call)
        self._modules.setdefault(key, RaggedRecord()).add(record)

    def records(self) -> list[AttentionRecord]:
        """One record of each module, in the order in which they were first called."""
        return [ragged.joined() for ragged in self._modules.values()]


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _kept(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _copy(record: AttentionRecord, new: slice) -> AttentionRecord:
    """What outlives a step: a cache may be written over in place, so nothing is a view of it."""

    return replace(
        record,
        q=record.q.detach().clone(),
        k=record.k[:, :, new].detach().clone(),
        v=record.v[:, :, new].detach().clone(),
        out=record.out.detach().clone(),
        lse=_kept(record.lse),
        residual=_kept(record.residual),
        weights=None,
    )


def _placed(part: Tensor, base: int, total: int, empty: float | bool) -> Tensor:
    """A step's map among all keys: those before its cache, and after, are `empty`."""
    whole = part.new_full((*part.shape[:3], total), empty)
    stop = min(total, base + part.shape[3])
    whole[..., base:stop] = part[..., : stop - base]
    return whole


def _stacked(parts: list[Tensor]) -> Tensor:
    """Maps of consecutive queries as one, with the batch and head axes of the largest."""
    batch, heads = (max(part.shape[axis] for part in parts) for axis in (0, 1))
    return torch.cat([part.expand(batch, heads, -1, -1) for part in parts], dim=2)


def _joined(parts: list[Tensor | None], axis: int) -> Tensor | None:
    known = [part for part in parts if part is not None]
    return torch.cat(known, dim=axis) if len(known) == len(parts) else None


def _joined_sinks(records: list[AttentionRecord]) -> Tensor | None:
    """The sink logits of all queries; one a head where all have the same, as learned ones do."""
    if records[0].sink_logit is None:
        return None
    batch, heads = records[0].q.shape[:2]
    parts = []
    for record in records:
        assert record.sink_logit is not None
        parts.append(record.sink_logit.detach().expand(batch, heads, record.q.shape[2]))
    whole = torch.cat(parts, dim=2)
    same = bool((whole == whole[:1, :, :1]).all())
    return whole[:1, :, :1].clone() if same else whole
