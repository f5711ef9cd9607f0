"""The statistics of one attention call: what each kind of token receives, and every sink.

Candidates (`candidates`) are keys that receive enough attention; judged by the event rule, some of
them are sinks; each sink gets the statistics of `sink_fields`.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkwise.attention.rank import output_root
from sinkwise.attention.screen import Screen
from sinkwise.attention.tiles import statistics_dtype
from sinkwise.core.layout import KINDS
from sinkwise.core.records import AttentionRecord
from sinkwise.diagnosis.rules import Rules
from sinkwise.measure.call_tokens import CallTokens
from sinkwise.measure.candidates import (
    Keys,
    ReceivedAttention,
    attention_to,
    candidates,
    judged_queries,
    received_by_candidates,
    received_exactly,
    received_screened,
)
from sinkwise.measure.residual import ResidualStatistics
from sinkwise.measure.sink_fields import SINK_FIELDS, Sinks
from sinkwise.measure.visibility import VisibilityCache, is_causal

EVENT_FIELDS = tuple(SINK_FIELDS)
"""Names of a sink's statistics, in the order of their columns."""


@dataclass(eq=False)
class CallStatistics:
    """What was measured on one attention call."""

    codes: Int[Tensor, "batch key"]
    """The kind of each key; `first` is known where the call is causal."""
    by_kind: Float[Tensor, "batch head kind"]
    """Share of all attention that the tokens of each kind receive, 0 to 1; NaN where not finite."""
    first: Float[Tensor, "batch head"]
    """Received attention of the first real token."""
    finite: Bool[Tensor, "batch head"]
    """False where NaN or Inf in scores or output make the head unreadable for a sample."""
    sinks: Keys
    """Row of the record's batch, head and key of each sink."""
    fields: dict[str, Tensor]
    """One value per sink, by the names of `SINK_FIELDS`."""
    screened: bool = False
    """Whether candidates were found by screening; `by_kind` is then an estimate."""


class CallMeter:
    """Measures calls; remembers what they share: visibility under a mask, and output weights."""

    def __init__(self, rules: Rules, screen: Screen | None = None) -> None:
        self.rules = rules
        self.screen = screen
        self.visibility = VisibilityCache()
        self._roots: dict[str, Tensor] = {}

    def measure(
        self,
        record: AttentionRecord,
        tokens: CallTokens,
        residual: ResidualStatistics | None = None,
        call_seed: int = 0,
    ) -> CallStatistics:
        """Measure one call; `residual` describes the block's input.

        With a screen, the candidates of long calls with a plain mask are found from a sample of the
        queries, seeded by `call_seed`; every number that is reported of a sink is exact then too.
        """
        attention = self._received(record, tokens, call_seed)
        counts = attention.counts
        finite = _finite_heads(record, attention.mass, tokens.real_queries)
        causal = is_causal(counts, tokens.real_keys)
        rule = self.rules.causal if causal else self.rules.bidirectional
        num_queries = tokens.num_queries(record)

        keys = candidates(attention, rule, num_queries, finite, tokens.real_keys)
        weights = attention_to(record, keys, attention.lse)
        received = attention.bound
        if attention.screened:
            received = received_by_candidates(record, attention, keys, weights)
            exact = rule.candidates(received, counts.count, counts.uniform, num_queries)
            sure = keys.of(exact)
            keys, weights = keys.only(sure), weights[sure]
        judged = judged_queries(record, keys, tokens.real_queries)
        accepted = rule.accept(weights, judged)
        keys = keys.only(accepted)
        sinks = Sinks(
            record=record,
            tokens=tokens,
            keys=keys,
            weights=weights[accepted],
            judged=judged[accepted],
            received=keys.of(received),
            uniform=keys.of(counts.uniform),
            root=self._root(record),
            residual=residual,
        )

        codes = tokens.causal_codes if causal else tokens.codes
        first = tokens.first_key(received.device)[:, None, None].expand(-1, received.shape[1], 1)
        return CallStatistics(
            codes=codes,
            by_kind=_share_by_kind(attention.mass / num_queries, codes, finite),
            first=received.gather(2, first)[..., 0].masked_fill(~finite, torch.nan),
            finite=finite,
            sinks=keys,
            fields={name: compute(sinks) for name, compute in SINK_FIELDS.items()},
            screened=attention.screened,
        )

    def _received(
        self, record: AttentionRecord, tokens: CallTokens, call_seed: int
    ) -> ReceivedAttention:
        counts = self.visibility.counts(record, tokens.real_queries)
        if self.screen is not None and tokens.real_queries is None and tokens.real_keys is None:
            found = received_screened(record, counts, self.screen, call_seed)
            if found is not None:
                return found
        return received_exactly(record, tokens.real_queries, counts)

    def _root(self, record: AttentionRecord) -> Tensor | None:
        """R of each head with |R v| = |layer_scale * W_O v|, or None where W_O is not known."""
        site = record.site
        if site is None or site.o is None or site.o.shape[0] != record.q.shape[1]:
            return None
        if site.o.shape[2] != record.v.shape[3]:
            return None
        if site.name not in self._roots:
            self._roots[site.name] = output_root(site.o, site.layer_scale)
        return self._roots[site.name]


def _finite_heads(
    record: AttentionRecord, mass: Tensor, real_queries: Tensor | None
) -> Bool[Tensor, "batch head"]:
    """False where the attention or the output of a head contains NaN or Inf."""
    out = record.out
    if real_queries is not None:
        out = out.masked_fill(~real_queries[:, None, :, None], 0.0)
    total = out.sum(dim=(-2, -1), dtype=statistics_dtype(out))
    return torch.isfinite(mass).all(dim=-1) & torch.isfinite(total)


def _share_by_kind(
    share: Float[Tensor, "batch head key"], codes: Tensor, finite: Tensor
) -> Float[Tensor, "batch head kind"]:
    """The share of all attention that goes to each kind of token."""
    share = share.masked_fill(~finite[..., None], torch.nan)
    one_hot = torch.nn.functional.one_hot(codes.to(share.device), len(KINDS))
    return share @ one_hot.to(share.dtype)
