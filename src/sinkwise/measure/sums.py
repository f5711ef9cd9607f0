"""Mergeable statistics: what a scan keeps of some samples, to be added up in their order."""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sinkwise.core.layout import KINDS, TokenLayout
from sinkwise.measure.call import EVENT_FIELDS, CallStatistics
from sinkwise.measure.residual import Border


@dataclass(eq=False)
class CallSums:
    """Sums over samples for one attention call site."""

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
class StreamSums:
    """Sums and extremes over samples for one block."""

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

    def append(self, later: "StreamSums") -> None:
        """Add the sums of samples that follow; of equal extremes the first one stays."""
        self.samples += later.samples
        self.normed |= later.normed
        for name in later.sums:
            self.sums[name] += later.sums[name]
            self.counts[name] += later.counts[name]
        self.massive_samples += later.massive_samples
        self.take_norm(later.token_norm_max, later.token_norm_max_token)
        self.take_activation(later.largest_activation, later.largest_token, later.largest_dim)

    def take_norm(self, value: float, token: int) -> None:
        """A token norm that may be the largest; NaN never is."""
        if value >= 0 and not value <= self.token_norm_max:
            self.token_norm_max, self.token_norm_max_token = value, token

    def take_activation(self, value: float, token: int, dim: int) -> None:
        """A coordinate that may be the largest; NaN never is."""
        if value >= 0 and not value <= self.largest_activation:
            self.largest_activation, self.largest_token, self.largest_dim = value, token, dim


PLACE_ROWS = 5
"""Of an event: its call site, sample, head, token, code of its kind."""


@dataclass(eq=False)
class Part:
    """What is kept of consecutive samples; samples are numbered from 0 within the part."""

    samples: int = 0
    calls: dict[tuple[int, str], CallSums] = field(default_factory=dict)
    """By layer and module, in the order in which they were first called."""
    streams: dict[int, StreamSums] = field(default_factory=dict)
    """By layer."""
    _events: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    _unreadable: list[np.ndarray] = field(default_factory=list)

    def add_call(
        self,
        layer: int,
        name: str,
        stats: CallStatistics,
        layout: TokenLayout,
        rows_a_sample: int = 1,
    ) -> None:
        """Add one call's statistics over all samples of the part.

        `rows_a_sample` is above 1 where attention runs in windows: they follow one another.
        """
        entry = self.calls.setdefault((layer, name), CallSums(stats.finite.shape[1]))
        index = list(self.calls).index((layer, name))
        whole = stats.finite.unflatten(0, (-1, rows_a_sample)).all(dim=1)
        # A second call of the same module counts no sample twice.
        entry.samples = max(entry.samples, len(whole))
        readable = whole.repeat_interleave(rows_a_sample, dim=0)
        # NaN where a sample is all padding, or where nobody sees the first token.
        by_kind, first = stats.by_kind.double(), stats.first.double()
        good = readable & torch.isfinite(by_kind).all(dim=-1)
        entry.kind_sum = entry.kind_sum + by_kind[good].sum(dim=0).cpu().numpy()
        entry.kind_count += float(good.sum())
        good = readable & torch.isfinite(first)
        entry.first_sum += float(first[good].sum())
        entry.first_count += float(good.sum())
        entry.kinds.update(KINDS[i] for i in layout.codes.unique().tolist())
        missing = (~whole).nonzero().cpu().numpy().T
        if missing.shape[1]:
            self._unreadable.append(np.stack([np.full(missing.shape[1], index), *missing]))
        if not len(stats.batch):
            return
        sample, token = stats.batch.cpu(), stats.key.cpu()
        place = layout.real.cpu().cumsum(dim=-1) - 1
        who = [
            torch.full_like(sample, index),
            sample // rows_a_sample,
            stats.head.cpu(),
            place[sample, token],
            layout.codes.cpu()[sample, token],
        ]
        what = torch.stack([stats.fields[name].float() for name in EVENT_FIELDS])
        # Copies, as numpy's views would keep the tensors alive.
        self._events.append((torch.stack(who).numpy().copy(), what.cpu().numpy().copy()))

    def add_stream(
        self, layer: int, before: Border, after: Border, real: Tensor | None, normed: bool
    ) -> None:
        """Add what a block did to the residual stream."""
        entry = self.streams.setdefault(layer, StreamSums())
        entry.samples += len(after.median)
        entry.normed |= normed
        first = torch.zeros(len(after.median), dtype=torch.int64, device=after.norm.device)
        place = torch.arange(after.norm.shape[1], device=first.device).expand_as(after.norm)
        if real is not None and real.shape == after.norm.shape:
            first = real.to(torch.int8).argmax(dim=-1)
            place = real.cumsum(dim=-1) - 1
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
        high, token = after.norm.nan_to_num(-1.0, posinf=-1.0).max(dim=-1)
        best = int(high.argmax())
        entry.take_norm(float(high[best]), int(place[best, token[best]]))
        largest = after.largest.nan_to_num(-1.0, posinf=-1.0)
        best = int(largest.argmax())
        entry.take_activation(
            float(largest[best]),
            int(place[best, after.largest_token[best]]),
            int(after.largest_dim[best]),
        )

    def append(self, later: "Part") -> None:
        """Add the samples that follow. In batch order, sums are the same to the last bit however
        the batches were measured.
        """
        for key, sums in later.calls.items():
            self.calls.setdefault(key, CallSums(sums.heads)).append(sums)
        for layer, stream in later.streams.items():
            self.streams.setdefault(layer, StreamSums()).append(stream)
        keys = list(self.calls)
        index = np.array([keys.index(key) for key in later.calls], dtype=np.int64)
        place, values = later.events
        if place.shape[1]:
            moved = np.stack([index[place[0]], place[1] + self.samples, *place[2:]])
            self._events.append((moved, values))
        missing = later.unreadable
        if missing.shape[1]:
            moved = np.stack([index[missing[0]], missing[1] + self.samples, missing[2]])
            self._unreadable.append(moved)
        self.samples += later.samples

    @property
    def events(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each event its place (`PLACE_ROWS`, int64), and its values (`EVENT_FIELDS`)."""
        empty = np.zeros((PLACE_ROWS, 0), np.int64), np.zeros((len(EVENT_FIELDS), 0), np.float32)
        parts = zip(*(self._events or [empty]), strict=True)
        place, values = (np.concatenate(part, axis=1) for part in parts)
        return place, values

    @property
    def unreadable(self) -> np.ndarray:
        """Call site, sample and head of what could not be read, a column each."""
        return np.concatenate([np.zeros((3, 0), np.int64), *self._unreadable], axis=1)

    @classmethod
    def restored(
        cls,
        samples: int,
        calls: dict[tuple[int, str], CallSums],
        streams: dict[int, StreamSums],
        events: tuple[np.ndarray, np.ndarray],
        unreadable: np.ndarray,
    ) -> "Part":
        """A part from what it was made of."""
        return cls(samples, calls, streams, [events], [unreadable])
