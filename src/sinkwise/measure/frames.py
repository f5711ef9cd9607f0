"""The statistics of a scan as frames."""

from typing import Any

import numpy as np
import polars as pl

from sinkwise.core.layout import KINDS
from sinkwise.diagnosis.rules import Rules
from sinkwise.measure.call import EVENT_FIELDS
from sinkwise.measure.sums import ResidualSums, SampleSums

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
"""Columns of the events frame: one row per sample, layer, head and sink."""

Spikes = dict[str, tuple[list[float], float]]
"""By module name: the spike of each head, and that of Gaussian weights."""


class Tables:
    """Lays out what a scan has gathered as three frames."""

    def __init__(self, sums: SampleSums, rules: Rules, spikes: Spikes | None = None) -> None:
        self.rules = rules
        self._sums = sums
        self._spikes = spikes or {}

    def events(self) -> pl.DataFrame:
        """One row per sample, layer, head and sink."""
        (call, sample, head, token, kind), values = self._sums.events
        if not len(call):
            return pl.DataFrame(schema=EVENT_SCHEMA)
        columns = {
            **self._index(call, sample, head),
            "token": token,
            "kind": np.array(KINDS, dtype=object)[kind],
            **dict(zip(EVENT_FIELDS, values, strict=True)),
        }
        frame = pl.DataFrame(columns, schema_overrides={"name": pl.String, "kind": pl.String})
        frame = frame.with_columns(self.rules.mechanism.classify().alias("mechanism"))
        frame = frame.select(*EVENT_SCHEMA).cast(pl.Schema(EVENT_SCHEMA))
        frame = frame.join(self._missing(), on=_HEAD_OF_SAMPLE, how="anti", maintain_order="left")
        # Two calls of one module may have the same sink: they stay in the order of the calls.
        return frame.sort(*_HEAD_OF_SAMPLE, "token", maintain_order=True)

    def _index(self, call: np.ndarray, sample: np.ndarray, head: np.ndarray) -> dict[str, Any]:
        """Columns that identify a sample's head."""
        calls = list(self._sums.calls)
        return {
            "sample": sample,
            "layer": np.array([layer for layer, _ in calls])[call],
            "name": np.array([name for _, name in calls], dtype=object)[call],
            "head": head,
        }

    def _missing(self) -> pl.DataFrame:
        """The samples on which a head had NaN or Inf, in any of its calls."""
        schema = pl.Schema({name: EVENT_SCHEMA[name] for name in _HEAD_OF_SAMPLE})
        call, sample, head = self._sums.unreadable
        if not len(call):
            return pl.DataFrame(schema=schema)
        frame = pl.DataFrame(self._index(call, sample, head), schema_overrides={"name": pl.String})
        return frame.cast(schema).unique()

    def heads(self, events: pl.DataFrame) -> pl.DataFrame:
        """One row per layer and head, with or without sinks."""
        rows = []
        for (layer, name), entry in self._sums.calls.items():
            spike, chance = self._spikes.get(name, ([float("nan")] * entry.heads, float("nan")))
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
        """One row per layer: attention received by kind of token, and the residual stream.

        `received_first` is the attention to each sample's first token, whatever its kind: the kind
        `first` has no column of its own.
        """
        kinds = set().union(*[entry.kinds for entry in self._sums.calls.values()]) - {
            "pad",
            "first",
        }
        present = [kind for kind in KINDS if kind in kinds]
        missing = self._missing()
        rows = []
        for (layer, name), entry in self._sums.calls.items():
            row: dict[str, object] = {"layer": layer, "name": name, "samples": entry.samples}
            count = entry.kind_count or float("nan")
            for kind in present:
                mean = entry.kind_sum[KINDS.index(kind)] / count
                row[f"received_{kind}"] = mean if kind in entry.kinds else float("nan")
            row["received_first"] = entry.first_sum / (entry.first_count or float("nan"))
            row.update(_residual_row(self._sums.residuals.get(layer)))
            here = (pl.col("layer") == layer) & (pl.col("name") == name)
            row["nonfinite"] = len(missing.filter(here))
            rows.append(row)
        schema = {
            "layer": pl.Int32, "name": pl.String, "samples": pl.Int64,
            **{f"received_{kind}": pl.Float64 for kind in present}, "received_first": pl.Float64,
            **_RESIDUAL_TYPES, "nonfinite": pl.Int64,
        }  # fmt: skip
        return pl.DataFrame(rows, schema=schema, orient="row").sort("layer", "name")


def _residual_row(entry: ResidualSums | None) -> dict[str, object]:
    if entry is None:
        return dict.fromkeys(_RESIDUAL_TYPES)
    means = {
        name: entry.sums[name] / entry.counts[name] if entry.counts[name] else float("nan")
        for name in _RESIDUAL_MEANS
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
_RESIDUAL_MEANS = (
    "token_norm_median", "token_norm_median_before", "token_norm_first", "similarity_before",
    "similarity_after",
)  # fmt: skip
_RESIDUAL_TYPES = {
    "token_norm_max": pl.Float64, "token_norm_max_token": pl.Int32,
    **dict.fromkeys(_RESIDUAL_MEANS, pl.Float64), "largest_activation": pl.Float64,
    "largest_token": pl.Int32, "largest_dim": pl.Int32, "massive_share": pl.Float64,
    "normed": pl.Boolean,
}  # fmt: skip
