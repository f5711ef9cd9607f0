"""The verdict on a model: which mechanisms dominate where, and what answers them."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import polars as pl

from sinkwise.diagnosis.rules import ModelRule

Prescription = Literal["none", "gate", "registers", "gate+registers"]

ADVICE: dict[str, str] = {
    "none": "Leave the model as it is.",
    "gate": "Put a sigmoid gate on each head's output, after the weighted sum and before W_O: a "
    "head with nothing to add can then close instead of looking at a null token.",
    "registers": "Add register tokens: they carry what is broadcast, and no content token has to.",
    "gate+registers": "Put a sigmoid gate on each head's output and add register tokens: gates "
    "answer the heads that do nothing, registers the heads that broadcast; neither does the "
    "other's work.",
}
"""What each prescription means."""

WORTH_SAYING = 0.15
"""Mean attention to the first token that is mentioned even where no rule is met."""

SHARED_BIN = 0.3
"""Mean attention to all registers together that is mentioned even where none of them is a sink."""

_VERDICTS = ("nop", "broadcast", "mixed", "unclassified")
_WORDS = {"nop": "NOP"}
_DEPTHS = ("early", "middle", "deep")


@dataclass(frozen=True, eq=False)
class Verdict:
    """What to do about a model, and the findings that say so."""

    prescription: Prescription
    evidence: tuple[str, ...]
    """One finding a line, in words with their figures."""
    by_depth: pl.DataFrame
    """One row a depth: heads, sink heads, heads of each verdict, the commonest kind of token."""

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
    """Weigh the heads of a scan.

    Heads that do nothing by way of a sink ask for a gate, on whatever token; heads that broadcast
    from a content token ask for registers, and those that broadcast from a register already have
    what they need. One mechanism alone is answered from `rule.dominance` of these heads on.
    """
    depths = _by_depth(heads)
    evidence = [_depth_line(row) for row in depths.iter_rows(named=True) if row["sinks"]]
    sinks = heads.filter(pl.col("verdict") != "none")
    total = len(heads)
    nonfinite = int(heads["nonfinite"].sum())
    if nonfinite:
        evidence.append(
            f"{nonfinite} of {int(heads['samples'].sum())} head readings hold NaN or Inf and were "
            "left out."
        )
    if len(sinks) < max(1, rule.min_head_share * total):
        evidence.insert(0, f"{len(sinks)} of {total} heads have a sink: nothing to answer.")
        evidence += _near_miss(layers, other_rule)
        evidence += _shared_bin(layers, sinks)
        return Verdict("none", tuple(evidence), depths)
    evidence.insert(0, _summary(sinks, total))
    evidence += _token_lines(sinks, events)
    evidence += _shared_bin(layers, sinks)
    does_nothing = sinks.filter(pl.col("verdict").is_in(["nop", "mixed"]))
    broadcasts = sinks.filter(pl.col("verdict").is_in(["broadcast", "mixed"]))
    on_registers = broadcasts.filter(pl.col("kind") == "register")
    moved = len(broadcasts) - len(on_registers)
    if len(on_registers):
        evidence.append(
            f"{len(on_registers)} of the broadcasting heads do so from a register already, which "
            "is what registers are for."
        )
    bins = does_nothing.filter(pl.col("kind") == "register")
    if len(bins):
        evidence.append(f"{len(bins)} heads use a register as a bin: they ask for a gate.")
    if not len(does_nothing) and not moved:
        if not len(broadcasts):
            evidence.append(
                "No sink shows the signature of either mechanism: value ratios lie between the "
                "thresholds or the updates have more than one direction."
            )
        return Verdict("none", tuple(evidence), depths)
    answered = len(does_nothing) + moved
    prescription: Prescription = "gate+registers"
    if len(does_nothing) / answered >= rule.dominance:
        prescription = "gate"
    elif moved / answered >= rule.dominance:
        prescription = "registers"
    return Verdict(prescription, tuple(evidence), depths)


def _by_depth(heads: pl.DataFrame) -> pl.DataFrame:
    """Heads by thirds of the layers."""
    layers = sorted(heads["layer"].unique().to_list())
    place = {layer: _DEPTHS[3 * i // len(layers)] for i, layer in enumerate(layers)}
    column = pl.col("layer").replace_strict(place, return_dtype=pl.String).alias("depth")
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


def _depth_line(row: dict[str, Any]) -> str:
    parts = ", ".join(f"{row[name]} {_WORDS.get(name, name)}" for name in _VERDICTS if row[name])
    layers = f"layers {row['first']}-{row['last']}"
    if row["first"] == row["last"]:
        layers = f"layer {row['first']}"
    ratio = "" if row["value_ratio"] is None else f", median value ratio {row['value_ratio']:.2f}"
    return (
        f"{row['depth'].capitalize()} ({layers}): {row['sinks']} of {row['heads']} heads sink "
        f"({parts}), mostly on {_named(row['kind'])}, on {row['inputs']:.0%} of the inputs"
        f"{ratio}."
    )


def _named(kind: str | None) -> str:
    names = {
        "cls": "the class token",
        "bos": "the first token (BOS)",
        "register": "registers",
        "patch": "patches",
        "other": "unnamed tokens",
    }
    return names.get(kind or "other", f"{kind} tokens")


def _summary(sinks: pl.DataFrame, total: int) -> str:
    counts = {name: int((sinks["verdict"] == name).sum()) for name in _VERDICTS}
    parts = ", ".join(f"{n} {_WORDS.get(name, name)}" for name, n in counts.items() if n)
    inputs = float(sinks.select(pl.col("sink_share").median()).item())
    often = "every input" if inputs == 1 else f"at least {math.floor(100 * inputs)}% of the inputs"
    return (
        f"{len(sinks)} of {total} heads ({len(sinks) / total:.0%}) have a sink: {parts}; "
        f"half of them on {often}."
    )


def _near_miss(layers: pl.DataFrame, other_rule: str | None) -> list[str]:
    """Where the first token gets much attention that the event rule does not call a sink."""
    near = layers.filter(pl.col("received_first").fill_nan(None) >= WORTH_SAYING)
    if not len(near):
        return []
    row = near.sort("received_first", descending=True).row(0, named=True)
    advice = f"; `--rule {other_rule}` asks for less" if other_rule else ""
    return [
        f"The first token receives {row['received_first']:.2f} of the attention in layer "
        f"{row['layer']}, which does not meet the event rule{advice}."
    ]


def _shared_bin(layers: pl.DataFrame, sinks: pl.DataFrame) -> list[str]:
    """Where registers share what one token would draw, so that the event rule sees none of it."""
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
    """Who the sinks are: the commonest places, with their share of all events."""
    if not len(events):
        return []
    places = (
        events.group_by("kind", "token")
        .agg(
            pl.len().alias("events"),
            (pl.col("mechanism") == "nop").sum().alias("nop"),
            (pl.col("mechanism") == "broadcast").sum().alias("broadcast"),
        )
        .sort("events", descending=True)
    )
    lines = []
    for row in places.head(2).iter_rows(named=True):
        if row["events"] < 0.05 * len(events):
            continue
        lines.append(
            f"Token {row['token']} ({row['kind']}) is {row['events'] / len(events):.0%} of all "
            f"sinks: {row['nop'] / row['events']:.0%} NOP, "
            f"{row['broadcast'] / row['events']:.0%} broadcast."
        )
    return lines
