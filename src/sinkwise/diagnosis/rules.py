"""The rules: when a token is a sink, and which of the two mechanisms a sink is."""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

import polars as pl
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinkwise.errors import InputError


@dataclass(frozen=True)
class EventRule(ABC):
    """When a key is an attention sink of one head on one sample.

    Common to all rules: only keys that enough queries can see are judged, and a sink receives at
    least `min_times_uniform` times what uniform attention under the same mask would give it.
    Uniform attention therefore never has a sink.
    """

    name: ClassVar[str]
    min_queries: int = 32
    """Minimum number of queries that can see the key."""
    min_times_uniform: float = 2.0
    """Minimum ratio of received attention to that of uniform attention."""

    @property
    @abstractmethod
    def floor(self) -> float:
        """Received attention below this is never an event."""

    @abstractmethod
    def enough_queries(
        self, count: Float[Tensor, "batch mask_head key"], queries: Float[Tensor, "batch 1 1"]
    ) -> Bool[Tensor, "batch mask_head key"]:
        """Which keys enough queries can see; `queries` is the number of queries of each sample."""

    def candidates(
        self,
        received: Float[Tensor, "batch head key"],
        count: Float[Tensor, "batch mask_head key"],
        uniform: Float[Tensor, "batch mask_head key"],
        queries: Float[Tensor, "batch 1 1"],
    ) -> Bool[Tensor, "batch head key"]:
        """Keys that may be events; `accept` decides from their columns of the map."""
        wanted = torch.clamp(self.min_times_uniform * uniform, min=self.floor)
        # Sums of float32: all attention of a head may add up to 1 - 1e-7.
        return (received >= wanted - 1e-6) & self.enough_queries(count, queries)

    @abstractmethod
    def accept(
        self, weights: Float[Tensor, "event query"], judged: Bool[Tensor, "event query"]
    ) -> Bool[Tensor, " event"]:
        """Which candidates are events, from their columns over the judged queries."""

    def describe(self) -> dict[str, Any]:
        """Name and numbers of the rule, for reports."""
        return {"name": self.name, **asdict(self)}


def _share(hits: Tensor, judged: Tensor) -> Float[Tensor, " event"]:
    return (hits & judged).sum(dim=-1) / judged.sum(dim=-1)


@dataclass(frozen=True)
class RelaxedRule(EventRule):
    """At least `share` of the queries that see the key give it at least `attention`.

    The default for bidirectional attention. A key that every query sees is always judged.
    Reference: authors' code for "A Unifying View of Attention Sinks", 2026, arXiv 2606.08105.
    """

    name: ClassVar[str] = "relaxed"
    share: float = 0.9
    """Share of the queries, 0 to 1."""
    attention: float = 0.5
    """Attention that each of them gives to the key, 0 to 1."""

    @property
    def floor(self) -> float:
        return self.share * self.attention

    def enough_queries(self, count: Tensor, queries: Tensor) -> Tensor:
        return count >= queries.clamp(max=self.min_queries)

    def accept(self, weights: Tensor, judged: Tensor) -> Tensor:
        return _share(weights >= self.attention, judged) >= self.share


@dataclass(frozen=True)
class MeanRule(EventRule):
    """The mean attention of the queries that see the key is at least `threshold`.

    The default for causal attention. Reference: Gu et al., 2024, arXiv 2410.10781 (epsilon = 0.3).
    """

    name: ClassVar[str] = "mean"
    threshold: float = 0.3
    """Received attention, 0 to 1."""

    @property
    def floor(self) -> float:
        return self.threshold

    def enough_queries(self, count: Tensor, queries: Tensor) -> Tensor:
        return count >= self.min_queries

    def accept(self, weights: Tensor, judged: Tensor) -> Tensor:
        return torch.ones(len(weights), dtype=torch.bool, device=weights.device)


@dataclass(frozen=True)
class LiteralRule(EventRule):
    """Every query that sees the key gives it at least 1 - `epsilon`.

    Reference: "A Unifying View of Attention Sinks", 2026, arXiv 2606.08105, the epsilon-sink.
    """

    name: ClassVar[str] = "literal"
    epsilon: float = 0.3
    """Attention that may go to other keys, 0 to 1."""

    @property
    def floor(self) -> float:
        return 1.0 - self.epsilon

    def enough_queries(self, count: Tensor, queries: Tensor) -> Tensor:
        return count >= queries.clamp(max=self.min_queries)

    def accept(self, weights: Tensor, judged: Tensor) -> Tensor:
        return ((weights >= 1.0 - self.epsilon - 1e-6) | ~judged).all(dim=-1)


@dataclass(frozen=True)
class MechanismRule:
    """NOP if the sink's value is small compared with those of other tokens; broadcast if it is not
    and the head's update has a single direction; else unclassified.

    Any strong sink with a value gives a stable rank near 1: it is necessary for a broadcast, but
    does not prove one. Reference: "A Unifying View of Attention Sinks", 2026, arXiv 2606.08105.
    """

    nop_ratio: float = 0.2
    """Greatest value ratio of an adaptive NOP."""
    broadcast_ratio: float = 0.5
    """Least value ratio of a broadcast."""
    broadcast_rank: float = 1.5
    """Greatest stable rank of a broadcast."""
    ratio: Literal["projected", "raw"] = "projected"
    """Which value ratio is used; without known output weights it is always the raw one."""

    def classify(self) -> pl.Expr:
        """The mechanism of each row of an events frame."""
        ratio = pl.col("value_ratio_raw")
        if self.ratio == "projected":
            ratio = pl.coalesce(pl.col("value_ratio").fill_nan(None), ratio)
        ratio = ratio.fill_nan(None)
        rank = pl.col("stable_rank").fill_nan(None)
        broadcast = (ratio >= self.broadcast_ratio) & (rank <= self.broadcast_rank)
        return (
            pl.when(ratio <= self.nop_ratio)
            .then(pl.lit("nop"))
            .when(broadcast)
            .then(pl.lit("broadcast"))
            .otherwise(pl.lit("unclassified"))
        )


@dataclass(frozen=True)
class HeadRule:
    """The verdict on a head: from how many samples have a sink, and of which mechanism."""

    min_sink_share: float = 0.1
    """Share of samples with a sink below which a head counts as having none."""
    majority: float = 2 / 3
    """Share of a head's sinks with the same mechanism from which the head has that verdict."""

    def classify(self) -> pl.Expr:
        """The verdict of each row of a heads frame."""
        both = pl.col("nop_share") + pl.col("broadcast_share")
        return (
            # Null where no sample was finite: no sink was seen there.
            pl.when(pl.col("sink_share").fill_null(0.0) < self.min_sink_share)
            .then(pl.lit("none"))
            .when(pl.col("nop_share") >= self.majority)
            .then(pl.lit("nop"))
            .when(pl.col("broadcast_share") >= self.majority)
            .then(pl.lit("broadcast"))
            .when(both >= self.majority)
            .then(pl.lit("mixed"))
            .otherwise(pl.lit("unclassified"))
        )


@dataclass(frozen=True)
class ModelRule:
    """What to do about a model, from the verdicts on its heads."""

    min_head_share: float = 0.02
    """Share of heads with a sink below which nothing is prescribed."""
    dominance: float = 0.8
    """Share of the classified heads from which only the remedy of one mechanism is prescribed."""


EVENT_RULES: dict[str, type[EventRule]] = {
    rule.name: rule for rule in (RelaxedRule, MeanRule, LiteralRule)
}
"""The event rules by name."""


@dataclass(frozen=True)
class Rules:
    """All rules that turn numbers into verdicts; stored in every result."""

    causal: EventRule = MeanRule()
    """Event rule of causal calls."""
    bidirectional: EventRule = RelaxedRule()
    """Event rule of all other calls."""
    mechanism: MechanismRule = MechanismRule()
    head: HeadRule = HeadRule()
    model: ModelRule = ModelRule()

    @classmethod
    def named(cls, name: str) -> "Rules":
        """`auto` (mean for causal calls, relaxed for others), or one event rule for all calls."""
        if name == "auto":
            return cls()
        if not isinstance(name, str):
            raise InputError(
                f"rules={name!r} is a {type(name).__name__} and must be a name or Rules(...)"
            )
        if name not in EVENT_RULES:
            known = ", ".join(["auto", *EVENT_RULES])
            raise InputError(f"rule={name!r} is unknown; give one of {known}")
        rule = EVENT_RULES[name]()
        return cls(causal=rule, bidirectional=rule)

    def describe(self) -> dict[str, Any]:
        """All rules with their numbers."""
        return {
            "causal": self.causal.describe(),
            "bidirectional": self.bidirectional.describe(),
            "mechanism": asdict(self.mechanism),
            "head": asdict(self.head),
            "model": asdict(self.model),
        }
