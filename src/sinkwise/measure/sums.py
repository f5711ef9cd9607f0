"""Mergeable statistics: what a scan keeps of its samples, added up in their order."""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sinkwise.core.layout import KINDS, code
from sinkwise.measure.call import EVENT_FIELDS, CallStatistics
from sinkwise.measure.residual import ResidualStatistics


@dataclass(eq=False)
class CallSums:
    """Sums over samples for one attention module."""

    heads: int
    samples: int = 0
    kind_sum: np.ndarray = field(default_factory=lambda: np.zeros(len(KINDS)))
    kind_count: float = 0.0
    first_sum: float = 0.0
    first_count: float = 0.0
    kinds: set[str] = field(default_factory=set)

    def append(self, later: "CallSums") -> None:
        """Add the sums of samples that follow."""
        self.samples += later.samples
        self.kind_sum = self.kind_sum + later.kind_sum
        self.kind_count += later.kind_count
        self.first_sum += later.first_sum
        self.first_count += later.first_count
        self.kinds |= later.kinds


@dataclass(eq=False)
class ResidualSums:
    """Sums and extremes over samples of the residual stream after one block."""

    samples: int = 0
    normed: bool = False
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    token_norm_max: float = float("nan")
    token_norm_max_token: int = -1
    largest_activation: float = float("nan")
    largest_token: int = -1
    largest_dim: int = -1
    massive_samples: int = 0

    def append(self, later: "ResidualSums") -> None:
        """Add the sums of samples that follow; the first of equal extremes is kept."""
        self.samples += later.samples
        self.normed |= later.normed
        for name in later.sums:
            self.sums[name] += later.sums[name]
            self.counts[name] += later.counts[name]
        self.massive_samples += later.massive_samples
        self.include_norm(later.token_norm_max, later.token_norm_max_token)
        self.include_activation(later.largest_activation, later.largest_token, later.largest_dim)

    def include_norm(self, value: float, token: int) -> None:
        """Update the largest token norm; NaN is ignored."""
        if value >= 0 and not value <= self.token_norm_max:
            self.token_norm_max, self.token_norm_max_token = value, token

    def include_activation(self, value: float, token: int, dim: int) -> None:
        """Update the largest activation; NaN is ignored."""
        if value >= 0 and not value <= self.largest_activation:
            self.largest_activation, self.largest_token, self.largest_dim = value, token, dim


EVENT_INDEX = ("call", "sample", "head", "token", "kind")
"""What identifies a sink: its module (by its number in `SampleSums.calls`), sample, head, token
(counted without padding) and the code of its kind."""


@dataclass(eq=False)
class SampleSums:
    """What is kept of consecutive samples, which are numbered from 0."""

    samples: int = 0
    calls: dict[tuple[int, str], CallSums] = field(default_factory=dict)
    """By layer and module name, in the order of their first calls."""
    residuals: dict[int, ResidualSums] = field(default_factory=dict)
    """By layer."""
    _events: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    _unreadable: list[np.ndarray] = field(default_factory=list)

    def add_call(
        self,
        layer: int,
        name: str,
        stats: CallStatistics,
        rows_per_sample: int = 1,
    ) -> None:
        """Add one call's statistics over all samples.

        `rows_per_sample` is above 1 for windowed attention: the windows of a sample are consecutive
        rows of the record's batch.
        """
        entry = self.calls.setdefault((layer, name), CallSums(stats.finite.shape[1]))
        index = list(self.calls).index((layer, name))
        whole = stats.finite.unflatten(0, (-1, rows_per_sample)).all(dim=1)
        # A second call of the same module counts no sample twice.
        entry.samples = max(entry.samples, len(whole))
        readable = whole.repeat_interleave(rows_per_sample, dim=0)
        # NaN where a sample is all padding, or where no query sees the first token.
        by_kind, first = stats.by_kind.double(), stats.first.double()
        good = readable & torch.isfinite(by_kind).all(dim=-1)
        entry.kind_sum = entry.kind_sum + by_kind[good].sum(dim=0).cpu().numpy()
        entry.kind_count += float(good.sum())
        good = readable & torch.isfinite(first)
        entry.first_sum += float(first[good].sum())
        entry.first_count += float(good.sum())
        entry.kinds.update(KINDS[i] for i in stats.codes.unique().tolist())
        missing = (~whole).nonzero().cpu().numpy().T
        if missing.shape[1]:
            self._unreadable.append(np.stack([np.full(missing.shape[1], index), *missing]))
        row, head, key = (part.cpu() for part in stats.sinks)
        if not len(row):
            return
        codes = stats.codes.cpu()
        token = (codes != code("pad")).cumsum(dim=-1) - 1
        rows = [
            torch.full_like(row, index),
            row // rows_per_sample,
            head,
            token[row, key],
            codes[row, key],
        ]
        values = torch.stack([stats.fields[name].float() for name in EVENT_FIELDS])
        # Copies, as numpy's views would keep the tensors alive.
        self._events.append((torch.stack(rows).numpy().copy(), values.cpu().numpy().copy()))

    def add_block(
        self,
        layer: int,
        before: ResidualStatistics,
        after: ResidualStatistics,
        real: Tensor | None,
        normed: bool,
    ) -> None:
        """Add the residual stream before and after a block."""
        entry = self.residuals.setdefault(layer, ResidualSums())
        entry.samples += len(after.median)
        entry.normed |= normed
        first = torch.zeros(len(after.median), dtype=torch.int64, device=after.norm.device)
        token = torch.arange(after.norm.shape[1], device=first.device).expand_as(after.norm)
        if real is not None and real.shape == after.norm.shape:
            first = real.to(torch.int8).argmax(dim=-1)
            token = real.cumsum(dim=-1) - 1
        values = {
            "token_norm_median": after.median,
            "token_norm_median_before": before.median,
            "token_norm_first": after.norm.gather(1, first[:, None])[:, 0],
            "similarity_before": before.similarity,
            "similarity_after": after.similarity,
        }
        for name, value in values.items():
            good = torch.isfinite(value)
            entry.sums[name] += float(value[good].double().sum())
            entry.counts[name] += int(good.sum())
        entry.massive_samples += int((after.massive > 0).sum())
        norm, position = after.norm.nan_to_num(-1.0, posinf=-1.0).max(dim=-1)
        best = int(norm.argmax())
        entry.include_norm(float(norm[best]), int(token[best, position[best]]))
        largest = after.largest.nan_to_num(-1.0, posinf=-1.0)
        best = int(largest.argmax())
        entry.include_activation(
            float(largest[best]),
            int(token[best, after.largest_token[best]]),
            int(after.largest_dim[best]),
        )

    def append(self, later: "SampleSums") -> None:
        """Add the samples that follow. Appended batch by batch, in order, the sums are equal bit
        for bit wherever each batch was measured.
        """
        for key, sums in later.calls.items():
            self.calls.setdefault(key, CallSums(sums.heads)).append(sums)
        for layer, residual in later.residuals.items():
            self.residuals.setdefault(layer, ResidualSums()).append(residual)
        keys = list(self.calls)
        index = np.array([keys.index(key) for key in later.calls], dtype=np.int64)
        rows, values = later.events
        if rows.shape[1]:
            renumbered = np.stack([index[rows[0]], rows[1] + self.samples, *rows[2:]])
            self._events.append((renumbered, values))
        rows = later.unreadable
        if rows.shape[1]:
            renumbered = np.stack([index[rows[0]], rows[1] + self.samples, rows[2]])
            self._unreadable.append(renumbered)
        self.samples += later.samples

    @property
    def events(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each sink `EVENT_INDEX` (int64) and `EVENT_FIELDS` (float32), a column each."""
        shapes = (len(EVENT_INDEX), 0), (len(EVENT_FIELDS), 0)
        empty = np.zeros(shapes[0], np.int64), np.zeros(shapes[1], np.float32)
        batches = zip(*(self._events or [empty]), strict=True)
        index, values = (np.concatenate(arrays, axis=1) for arrays in batches)
        return index, values

    @property
    def unreadable(self) -> np.ndarray:
        """Module, sample and head of every attention map with NaN or Inf: a column each."""
        return np.concatenate([np.zeros((3, 0), np.int64), *self._unreadable], axis=1)

    @classmethod
    def restored(
        cls,
        samples: int,
        calls: dict[tuple[int, str], CallSums],
        residuals: dict[int, ResidualSums],
        events: tuple[np.ndarray, np.ndarray],
        unreadable: np.ndarray,
    ) -> "SampleSums":
        """The inverse of reading its attributes."""
        return cls(samples, calls, residuals, [events], [unreadable])
