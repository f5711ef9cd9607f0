"""The verdict on a model: which mechanism dominates where, and what to do about it."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import polars as pl

from sinkwise.diagnosis.rules import MeanRule, ModelRule

Prescription = Literal["none", "gate", "registers", "gate+registers"]

ADVICE: dict[str, str] = {
    "none": "Leave the model as it is.",
    "gate": "Put a sigmoid gate on each head's output, after the weighted sum and before W_O: a "
    "head with nothing to add can then close instead of attending to a null token.",
    "registers": "Add register tokens to carry what is broadcast, so that no content token has to.",
    "gate+registers": "Put a sigmoid gate on each head's output and add register tokens: gates are "
    "for the heads that do nothing, registers for the heads that broadcast, and neither replaces "
    "the other.",
}
"""What each prescription means."""

NEAR_MISS = 0.15
"""Mean attention to the first token that is worth a line even if it meets no event rule."""

SHARED_BIN = MeanRule.threshold
"""Mean attention to all registers together that is worth a line even if none of them is a sink."""

MIN_TOKEN_SHARE = 0.05
"""Share of all sinks from which a token is worth a line."""

_VERDICTS = ("nop", "broadcast", "mixed", "unclassified")
_WORDS = {"nop": "NOP"}
_DEPTHS = ("early", "middle", "deep")


@dataclass(frozen=True, eq=False)
class Verdict:
    """What to do about a model, and the findings behind it."""

    prescription: Prescription
    evidence: tuple[str, ...]
    """One finding per line, in words and figures."""
    by_depth: pl.DataFrame
    """One row per third of the depth: heads, heads with a sink, heads by verdict, the commonest
    kind of sink."""

    @property
    def advice(self) -> str:
        """The prescription in plain words."""
        return ADVICE[self.prescription]


def judge(
    heads: pl.DataFrame,
    events: pl.DataFrame,
    layers: pl.DataFrame,
    rule: ModelRule,
    other_rule: str | None = None,
) -> Verdict:
    """The verdict from the frames of a scan.

    Heads with a NOP sink need a gate, whatever token the sink is. Heads that broadcast from a
    content token need registers; those that broadcast from a register have what they need. If one
    mechanism has `rule.dominance` of these heads or more, only its remedy is prescribed.
    `other_rule` names a less strict event rule to suggest.
    """
    depths = _by_depth(heads)
    single = bool((heads["samples"] <= 1).all())
    evidence = [_depth_line(row, single) for row in depths.iter_rows(named=True) if row["sinks"]]
    sinks = heads.filter(pl.col("verdict") != "none")
    total = len(heads)
    nonfinite = int(heads["nonfinite"].sum())
    if nonfinite:
        evidence.append(
            f"{nonfinite} of {int(heads['samples'].sum())} attention maps contain NaN or Inf and "
            "were left out."
        )
    if len(sinks) < max(1, rule.min_head_share * total):
        evidence.insert(0, f"{len(sinks)} of {total} heads have a sink: nothing to do.")
        evidence += _near_miss(layers, other_rule)
        evidence += _shared_bin(layers, sinks)
        return Verdict("none", tuple(evidence), depths)
    evidence.insert(0, _summary(sinks, total, single))
    evidence += _token_lines(sinks, events)
    evidence += _shared_bin(layers, sinks)
    does_nothing = sinks.filter(pl.col("verdict").is_in(["nop", "mixed"]))
    broadcasts = sinks.filter(pl.col("verdict").is_in(["broadcast", "mixed"]))
    on_registers = broadcasts.filter(pl.col("kind") == "register")
    moved = len(broadcasts) - len(on_registers)
    if len(on_registers):
        evidence.append(
            f"{len(on_registers)} of the broadcasting heads already do so from a register, which "
            "is what registers are for."
        )
    bins = does_nothing.filter(pl.col("kind") == "register")
    if len(bins):
        evidence.append(
            f"{len(bins)} heads use a register as a bin for unused attention: they need a gate."
        )
    if not len(does_nothing) and not moved:
        if not len(broadcasts):
            evidence.append(
                "No sink shows the signature of either mechanism: value ratios lie between the "
                "thresholds, or the updates have more than one direction."
            )
        return Verdict("none", tuple(evidence), depths)
    treated = len(does_nothing) + moved
    prescription: Prescription = "gate+registers"
    if len(does_nothing) / treated >= rule.dominance:
        prescription = "gate"
    elif moved / treated >= rule.dominance:
        prescription = "registers"
    return Verdict(prescription, tuple(evidence), depths)


def _by_depth(heads: pl.DataFrame) -> pl.DataFrame:
    """Heads by thirds of the layers."""
    layers = sorted(heads["layer"].unique().to_list())
    depth = {layer: _DEPTHS[3 * i // len(layers)] for i, layer in enumerate(layers)}
    column = pl.col("layer").replace_strict(depth, return_dtype=pl.String).alias("depth")
    sink = pl.col("verdict") != "none"
    return (
        heads.with_columns(column)
        .group_by("depth")
        .agg(
            pl.col("layer").min().alias("first"),
            pl.col("layer").max().alias("last"),
            pl.len().alias("heads"),
            sink.sum().alias("sinks"),
            *[(pl.col("verdict") == name).sum().alias(name) for name in _VERDICTS],
            pl.col("kind").filter(sink).drop_nulls().mode().sort().first().alias("kind"),
            pl.col("sink_share").filter(sink).median().alias("inputs"),
            pl.col("value_ratio").filter(sink).median().alias("value_ratio"),
        )
        .sort("first")
    )


def _depth_line(row: dict[str, Any], single: bool) -> str:
    parts = ", ".join(f"{row[name]} {_WORDS.get(name, name)}" for name in _VERDICTS if row[name])
    layers = f"layers {row['first']}-{row['last']}"
    if row["first"] == row["last"]:
        layers = f"layer {row['first']}"
    often = "" if single else f", on {row['inputs']:.0%} of the inputs"
    ratio = "" if row["value_ratio"] is None else f", median value ratio {row['value_ratio']:.2f}"
    return (
        f"{row['depth'].capitalize()} ({layers}): {row['sinks']} of {row['heads']} heads have a "
        f"sink ({parts}), mostly on {_named(row['kind'])}{often}{ratio}."
    )


def _named(kind: str | None) -> str:
    names = {
        "cls": "the class token",
        "bos": "the first token (BOS)",
        "first": "the first token",
        "register": "registers",
        "patch": "patches",
        "other": "tokens of unknown kind",
    }
    return names.get(kind or "other", f"{kind} tokens")


def _summary(sinks: pl.DataFrame, total: int, single: bool) -> str:
    counts = {name: int((sinks["verdict"] == name).sum()) for name in _VERDICTS}
    parts = ", ".join(f"{n} {_WORDS.get(name, name)}" for name, n in counts.items() if n)
    found = f"{len(sinks)} of {total} heads ({len(sinks) / total:.0%}) have a sink: {parts}"
    if single:
        return f"{found}."
    inputs = float(sinks.select(pl.col("sink_share").median()).item())
    often = "every input" if inputs == 1 else f"at least {math.floor(100 * inputs)}% of the inputs"
    return f"{found}; half of them on {often}."


def _near_miss(layers: pl.DataFrame, other_rule: str | None) -> list[str]:
    """The layer where the first token receives most attention, if no event rule is met."""
    near = layers.filter(pl.col("received_first").fill_nan(None) >= NEAR_MISS)
    if not len(near):
        return []
    row = near.sort("received_first", descending=True).row(0, named=True)
    advice = f" (the `{other_rule}` rule is less strict)" if other_rule else ""
    return [
        f"The first token receives {row['received_first']:.2f} of the attention in layer "
        f"{row['layer']}, which does not meet the event rule{advice}."
    ]


def _shared_bin(layers: pl.DataFrame, sinks: pl.DataFrame) -> list[str]:
    """The layer where registers together receive most attention, if none of them is a sink."""
    if "received_register" not in layers.columns or (sinks["kind"] == "register").any():
        return []
    shared = layers.filter(pl.col("received_register").fill_nan(None) >= SHARED_BIN)
    if not len(shared):
        return []
    row = shared.sort("received_register", descending=True).row(0, named=True)
    return [
        f"All registers together receive {row['received_register']:.2f} of the attention in layer "
        f"{row['layer']}; none of them alone meets the event rule."
    ]


def _token_lines(sinks: pl.DataFrame, events: pl.DataFrame) -> list[str]:
    """The commonest sinks, with their share of all events."""
    if not len(events):
        return []
    tokens = (
        events.group_by("kind", "token")
        .agg(
            pl.len().alias("events"),
            (pl.col("mechanism") == "nop").sum().alias("nop"),
            (pl.col("mechanism") == "broadcast").sum().alias("broadcast"),
        )
        .sort("events", "token", "kind", descending=[True, False, False])
    )
    lines = []
    for row in tokens.head(2).iter_rows(named=True):
        if row["events"] < MIN_TOKEN_SHARE * len(events):
            continue
        lines.append(
            f"Token {row['token']} ({row['kind']}) is {row['events'] / len(events):.0%} of all "
            f"sinks: {row['nop'] / row['events']:.0%} NOP, "
            f"{row['broadcast'] / row['events']:.0%} broadcast."
        )
    return lines
