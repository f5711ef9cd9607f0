"""Accumulate statistics over batches, and lay them out as frames."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor

from sinkwise.layout import KINDS, TokenLayout
from sinkwise.measure.call import EVENT_FIELDS, CallStatistics
from sinkwise.measure.stream import Border
from sinkwise.rules import Rules

EVENT_SCHEMA: dict[str, pl.DataType] = {
    "sample": pl.Int64(),
    "layer": pl.Int32(),
    "name": pl.String(),
    "head": pl.Int32(),
    "token": pl.Int32(),
    "kind": pl.String(),
    **{name: pl.Float32() for name in EVENT_FIELDS},
    "mechanism": pl.String(),
}
"""Columns of the events frame: one row a sample, layer, head and sink."""


@dataclass
class _Layer:
    """Sums over samples for one attention call site."""

    name: str
    heads: int
    samples: int = 0
    end: int = 0
    """Samples below this number are counted; a second call of the module counts none twice."""
    kind_sum: np.ndarray = field(default_factory=lambda: np.zeros(len(KINDS)))
    kind_count: float = 0.0
    first_sum: float = 0.0
    first_count: float = 0.0
    kinds: set[str] = field(default_factory=set)


@dataclass
class _Stream:
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


class Tables:
    """What a scan gathers: event rows, and sums for each head, layer and block."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self._chunks: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._unreadable: list[tuple[np.ndarray, np.ndarray]] = []
        self._layers: dict[tuple[int, str], _Layer] = {}
        self._streams: dict[int, _Stream] = {}
        self.spikes: dict[str, tuple[list[float], float]] = {}

    def add_call(
        self,
        layer: int,
        name: str,
        stats: CallStatistics,
        layout: TokenLayout,
        offset: int,
        rows_a_sample: int = 1,
    ) -> None:
        """Add one call's statistics; `offset` is the number of the batch's first sample.

        `rows_a_sample` is above 1 where attention runs in windows: they follow one another.
        """
        heads = stats.finite.shape[1]
        entry = self._layers.setdefault((layer, name), _Layer(name, heads))
        index = list(self._layers).index((layer, name))
        whole = stats.finite.unflatten(0, (-1, rows_a_sample)).all(dim=1)
        entry.samples += max(0, offset + len(whole) - max(entry.end, offset))
        entry.end = offset + len(whole)
        readable = whole.repeat_interleave(rows_a_sample, dim=0)
        # NaN where a sample is all padding, or where nobody sees the first token.
        by_kind, first = stats.by_kind.double(), stats.first.double()
        good = readable & torch.isfinite(by_kind).all(dim=-1)
        entry.kind_sum += by_kind[good].sum(dim=0).cpu().numpy()
        entry.kind_count += float(good.sum())
        good = readable & torch.isfinite(first)
        entry.first_sum += float(first[good].sum())
        entry.first_count += float(good.sum())
        entry.kinds.update(KINDS[i] for i in layout.codes.unique().tolist())
        missing = (~whole).nonzero().cpu().numpy()
        if len(missing):
            missing[:, 0] += offset
            self._unreadable.append((np.full(len(missing), index), missing.T))
        if not len(stats.batch):
            return
        sample, token = stats.batch.cpu(), stats.key.cpu()
        place = layout.real.cpu().cumsum(dim=-1) - 1
        self._chunks.append(
            (
                np.full(len(sample), index),
                torch.stack(
                    [
                        sample // rows_a_sample + offset,
                        stats.head.cpu(),
                        place[sample, token],
                        layout.codes.cpu()[sample, token],
                    ]
                ).numpy(),
                torch.stack([stats.fields[name].float() for name in EVENT_FIELDS]).cpu().numpy(),
            )
        )

    def add_stream(
        self, layer: int, before: Border, after: Border, real: Tensor | None, normed: bool
    ) -> None:
        """Add what a block did to the residual stream."""
        entry = self._streams.setdefault(layer, _Stream())
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
        if high[best] >= 0 and not float(high[best]) <= entry.token_norm_max:
            entry.token_norm_max = float(high[best])
            entry.token_norm_max_token = int(place[best, token[best]])
        largest = after.largest.nan_to_num(-1.0, posinf=-1.0)
        best = int(largest.argmax())
        if largest[best] >= 0 and not float(largest[best]) <= entry.largest_activation:
            entry.largest_activation = float(largest[best])
            entry.largest_token = int(place[best, after.largest_token[best]])
            entry.largest_dim = int(after.largest_dim[best])

    def events(self) -> pl.DataFrame:
        """One row a sample, layer, head and sink."""
        if not self._chunks:
            return pl.DataFrame(schema=EVENT_SCHEMA)
        where, who, what = (
            np.concatenate(part, axis=-1) for part in zip(*self._chunks, strict=True)
        )
        columns = {
            **self._place(where, who[0], who[1]),
            "token": who[2],
            "kind": np.array(KINDS, dtype=object)[who[3]],
            **dict(zip(EVENT_FIELDS, what, strict=True)),
        }
        frame = pl.DataFrame(columns, schema_overrides={"name": pl.String, "kind": pl.String})
        frame = frame.with_columns(self.rules.mechanism.classify().alias("mechanism"))
        frame = frame.select(*EVENT_SCHEMA).cast(pl.Schema(EVENT_SCHEMA))
        frame = frame.join(self._missing(), on=_HEAD_OF_SAMPLE, how="anti")
        return frame.sort("sample", "layer", "name", "head", "token")

    def _place(self, call: np.ndarray, sample: np.ndarray, head: np.ndarray) -> dict[str, Any]:
        """Columns that say where a row belongs."""
        calls = list(self._layers)
        return {
            "sample": sample,
            "layer": np.array([layer for layer, _ in calls])[call],
            "name": np.array([name for _, name in calls], dtype=object)[call],
            "head": head,
        }

    def _missing(self) -> pl.DataFrame:
        """The samples on which a head could not be read, in whatever call."""
        schema = pl.Schema({name: EVENT_SCHEMA[name] for name in _HEAD_OF_SAMPLE})
        if not self._unreadable:
            return pl.DataFrame(schema=schema)
        call, who = (np.concatenate(part, axis=-1) for part in zip(*self._unreadable, strict=True))
        frame = pl.DataFrame(self._place(call, *who), schema_overrides={"name": pl.String})
        return frame.cast(schema).unique()

    def heads(self, events: pl.DataFrame) -> pl.DataFrame:
        """One row a layer and head, with or without sinks."""
        rows = []
        for (layer, name), entry in self._layers.items():
            spike, chance = self.spikes.get(name, ([float("nan")] * entry.heads, float("nan")))
            for head in range(entry.heads):
                rows.append((layer, name, head, entry.samples, spike[head], chance))
        names = [*_HEAD, "samples", "spike", "spike_random"]
        schema = dict(zip(names, _HEAD_TYPES, strict=True))
        frame = pl.DataFrame(rows, schema=schema, orient="row")
        missing = self._missing().group_by(_HEAD).agg(pl.len().cast(pl.Int64).alias("nonfinite"))
        frame = frame.join(missing, on=_HEAD, how="left")
        frame = frame.with_columns(pl.col("nonfinite").fill_null(0))
        grouped = events.group_by(_HEAD).agg(
            pl.col("sample").n_unique().alias("_hit"),
            pl.col("kind").mode().sort().first(),
            pl.col("token").mode().min(),
            *[pl.col(c).fill_nan(None).median() for c in ("received", *_MEDIANS)],
            (pl.col("mechanism") == "nop").mean().alias("nop_share"),
            (pl.col("mechanism") == "broadcast").mean().alias("broadcast_share"),
        )  # fmt: skip
        frame = frame.join(grouped, on=_HEAD, how="left")
        readable = (pl.col("samples") - pl.col("nonfinite")).cast(pl.Float64)
        share = pl.when(readable > 0).then(pl.col("_hit").fill_null(0) / readable)
        frame = frame.with_columns(
            share.alias("sink_share"),
            pl.col("nop_share", "broadcast_share").fill_null(0.0),
        )
        verdict = self.rules.head.classify().alias("verdict")
        order = [
            "layer", "name", "head", "samples", "sink_share", "kind", "token", "received",
            "value_ratio", "value_ratio_raw", "stable_rank", "spike", "spike_random",
            "nop_share", "broadcast_share", "verdict", "nonfinite",
        ]  # fmt: skip
        return frame.with_columns(verdict).select(order).sort(_HEAD)

    def layers(self) -> pl.DataFrame:
        """One row a layer: where attention goes by kind of token, and the residual stream."""
        kinds = set().union(*[entry.kinds for entry in self._layers.values()]) - {"pad"}
        present = [kind for kind in KINDS if kind in kinds]
        missing = self._missing()
        rows = []
        for (layer, name), entry in self._layers.items():
            row: dict[str, object] = {"layer": layer, "name": name, "samples": entry.samples}
            count = entry.kind_count or float("nan")
            for kind in present:
                mean = entry.kind_sum[KINDS.index(kind)] / count
                row[f"received_{kind}"] = mean if kind in entry.kinds else float("nan")
            row["received_first"] = entry.first_sum / (entry.first_count or float("nan"))
            row.update(self._stream_row(self._streams.get(layer)))
            here = (pl.col("layer") == layer) & (pl.col("name") == name)
            row["nonfinite"] = len(missing.filter(here))
            rows.append(row)
        schema = {
            "layer": pl.Int32, "name": pl.String, "samples": pl.Int64,
            **{f"received_{kind}": pl.Float64 for kind in present}, "received_first": pl.Float64,
            **_STREAM_TYPES, "nonfinite": pl.Int64,
        }  # fmt: skip
        return pl.DataFrame(rows, schema=schema, orient="row").sort("layer", "name")

    @staticmethod
    def _stream_row(entry: _Stream | None) -> dict[str, object]:
        if entry is None:
            return dict.fromkeys(_STREAM_TYPES)
        means = {
            name: entry.sums[name] / entry.counts[name] if entry.counts[name] else float("nan")
            for name in _STREAM_MEANS
        }
        return {
            "token_norm_max": entry.token_norm_max,
            "token_norm_max_token": entry.token_norm_max_token,
            **means,
            "largest_activation": entry.largest_activation,
            "largest_token": entry.largest_token,
            "largest_dim": entry.largest_dim,
            "massive_share": entry.massive_samples / entry.samples,
            "normed": entry.normed,
        }


_MEDIANS = ("value_ratio", "value_ratio_raw", "stable_rank")
_HEAD = ["layer", "name", "head"]
_HEAD_OF_SAMPLE = ["sample", *_HEAD]
_HEAD_TYPES = (pl.Int32, pl.String, pl.Int32, pl.Int64, pl.Float64, pl.Float64)
_STREAM_MEANS = (
    "token_norm_median", "token_norm_median_before", "token_norm_first", "similarity_before",
    "similarity_after",
)  # fmt: skip
_STREAM_TYPES = {
    "token_norm_max": pl.Float64, "token_norm_max_token": pl.Int32,
    **dict.fromkeys(_STREAM_MEANS, pl.Float64), "largest_activation": pl.Float64,
    "largest_token": pl.Int32, "largest_dim": pl.Int32, "massive_share": pl.Float64,
    "normed": pl.Boolean,
}  # fmt: skip
