"""Everything that one attention call tells: received attention, and the measures of its sinks."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkwise.attention.column import columns, visible_column
from sinkwise.attention.rank import output_root, update_spectrum
from sinkwise.attention.received import Seen, received_mass, seen
from sinkwise.attention.screen import Screen, Screened, screen
from sinkwise.attention.tiles import statistics_dtype
from sinkwise.core.layout import KINDS
from sinkwise.core.records import AttentionMask, AttentionRecord
from sinkwise.diagnosis.rules import Rules
from sinkwise.measure.residual import Border

EVENT_FIELDS = (
    "received", "received_excess", "routed_share", "min_attention", "value_ratio",
    "value_ratio_raw", "stable_rank", "rank_one_energy", "update_norm", "token_norm_ratio",
)  # fmt: skip


WORTH_SCREENING = 0.5
"""Share of the scores from which a screening saves nothing."""


@dataclass(eq=False)
class CallStatistics:
    """What was measured on one attention call."""

    by_kind: Float[Tensor, "batch head kind"]
    """Share of all attention that the tokens of each kind get, 0 to 1; NaN where not finite."""
    first: Float[Tensor, "batch head"]
    """Received attention of the first real token."""
    finite: Bool[Tensor, "batch head"]
    """False where NaN or Inf in scores or output make the head unreadable for a sample."""
    batch: Int[Tensor, " event"]
    """Row of the record's batch, head and key of each event."""
    head: Int[Tensor, " event"]
    key: Int[Tensor, " event"]
    fields: dict[str, Tensor]
    """One value an event, by the names of `EVENT_FIELDS`."""


class CallMeter:
    """Measures calls; keeps what calls share: who sees whom under a mask, and output weights."""

    def __init__(self, rules: Rules, screen: Screen | None = None) -> None:
        self.rules = rules
        self.screen = screen
        self.calls = {"screened": 0, "exact": 0}
        self._roots: dict[str, Tensor] = {}
        self._seen: list[tuple[AttentionMask, tuple[int, int, int], object, Seen]] = []

    def measure(
        self,
        record: AttentionRecord,
        codes: Tensor,
        real: Tensor | None,
        stream: Border | None,
        draw: int = 0,
    ) -> CallStatistics:
        """Measure one call; `codes` [batch key] are kinds of keys, `real` marks no padding (None:
        all are real, or query and key are different sequences), `stream` is the block's input.

        With a screen, calls that are long and plainly masked (`draw` numbers their sample) name
        their candidates from some of the queries; whatever is reported of an event is exact then
        too, `by_kind` is an estimate.
        """
        counted = real
        screened = self._screened(record, counted, draw)
        if screened is None:
            received, mass, lse, count = self._received(record, counted)
            bound = received
        else:
            lse, mass, count = record.lse, screened.mass, self._who_sees(record, None)
            bound = screened.received + screened.margin
        queries = torch.full((record.q.shape[0], 1, 1), float(record.q.shape[2]))
        if counted is not None:
            queries = counted.sum(dim=-1).to(mass.dtype)[:, None, None]
        queries = queries.to(mass.device)
        finite = torch.isfinite(mass).all(dim=-1) & _finite_rows(record.out, counted)
        rule = self.rules.causal if _is_causal(count, real) else self.rules.bidirectional
        possible = rule.candidates(bound, count.count, count.uniform, queries)
        possible &= finite[..., None]
        if real is not None:
            possible &= real[:, None, :]
        batch, head, key = possible.nonzero(as_tuple=True)
        weights = self._columns(record, lse, batch, head, key)
        if screened is not None:
            received = self._confirmed(record, count, (batch, head, key), weights)
            exact = rule.candidates(received, count.count, count.uniform, queries)
            sure = exact[batch, head, key]
            batch, head, key, weights = batch[sure], head[sure], key[sure], weights[sure]
        judged = visible_column(record.mask, batch, head, key, record.q.shape[2])
        if counted is not None:
            judged &= counted[batch]
        kept = rule.accept(weights, judged)
        batch, head, key = batch[kept], head[kept], key[kept]
        fields = self._fields(record, real, stream, batch, head, key, weights[kept], judged[kept])
        fields["received"] = received[batch, head, key]
        shared = head.clamp(max=count.uniform.shape[1] - 1)
        fields["received_excess"] = fields["received"] - count.uniform[batch, shared, key]
        share = (mass / queries).masked_fill(~finite[..., None], torch.nan)
        hot = torch.nn.functional.one_hot(codes.to(mass.device), len(KINDS)).to(mass.dtype)
        first = torch.zeros(len(codes), dtype=torch.int64, device=mass.device)
        if real is not None:
            first = real.to(torch.int8).argmax(dim=-1)
        index = first[:, None, None].expand(-1, received.shape[1], 1)
        return CallStatistics(
            by_kind=share @ hot,
            first=received.gather(2, index)[..., 0].masked_fill(~finite, torch.nan),
            finite=finite,
            batch=batch,
            head=head,
            key=key,
            fields=fields,
        )

    def _screened(
        self, record: AttentionRecord, counted: Tensor | None, draw: int
    ) -> Screened | None:
        """Estimates from a sample of the queries, where a screen is wanted, fits and pays."""
        mask, found = record.mask, None
        square = record.q.shape[2] == record.k.shape[2] or not mask.causal
        plain = _same(mask, AttentionMask(causal=mask.causal)) and square and counted is None
        if self.screen is not None and plain and record.lse is not None and record.weights is None:
            sample = self.screen.sample(record.q.shape[2], mask.causal, draw)
            if sample.cost <= WORTH_SCREENING:
                found = screen(
                    record.q,
                    record.k,
                    record.lse,
                    sample,
                    scale=record.scale,
                    miss=self.screen.miss,
                    softcap=record.softcap,
                )
        self.calls["exact" if found is None else "screened"] += 1
        return found

    def _confirmed(
        self,
        record: AttentionRecord,
        count: Seen,
        place: tuple[Tensor, Tensor, Tensor],
        weights: Float[Tensor, "event query"],
    ) -> Float[Tensor, "batch head key"]:
        """Received attention of a screening's candidates and of the first key, from their own
        columns; NaN for every other key.
        """
        seen_by = count.count[0, 0].to(weights.dtype)
        shape = (*record.q.shape[:2], record.k.shape[2])
        received = weights.new_full(shape, torch.nan)
        received[place] = weights.sum(dim=-1) / seen_by[place[2]]
        received[:, :, 0] = self._first(record) / seen_by[0]
        return received

    def _first(self, record: AttentionRecord) -> Float[Tensor, "batch head"]:
        """Attention to the first key, summed over all queries."""
        shape = record.q.shape[:2]
        batch, head = torch.ones(shape, device=record.q.device).nonzero(as_tuple=True)
        weights = self._columns(record, record.lse, batch, head, torch.zeros_like(head))
        return weights.sum(dim=-1).reshape(shape)

    def _received(
        self, record: AttentionRecord, counted: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Seen]:
        """(mean attention over the queries that see a key, sums, log-sum-exp, who sees)."""
        lse = record.lse
        if record.weights is not None:
            weights = record.weights.to(statistics_dtype(record.q))
            if counted is not None:
                weights = weights.masked_fill(~counted[:, None, :, None], 0.0)
            mass = weights.sum(dim=-2)
        else:
            result = received_mass(
                record.q,
                record.k,
                scale=record.scale,
                mask=record.mask,
                softcap=record.softcap,
                sink_logit=record.sink_logit,
                lse=lse,
                counted=counted,
            )
            mass, lse = result
        count = self._who_sees(record, counted)
        total = count.count.to(mass.dtype)
        received = mass / total.masked_fill(total == 0, torch.nan)
        return received, mass, lse, Seen(total, count.uniform.to(mass.dtype))

    def _who_sees(self, record: AttentionRecord, counted: Tensor | None) -> Seen:
        """`seen` of the call's mask: layers share their mask, so it is computed once."""
        mask = record.mask
        if not record.faithful and record.weights is not None and mask.is_open:
            mask = AttentionMask(allowed=_visible(record.weights))
        shape = (record.q.shape[0], record.q.shape[2], record.k.shape[2])
        for known, size, rows, result in self._seen:
            if size == shape and rows is counted and _same(known, mask):
                return result
        result = seen(mask, shape, counted, record.q.device)
        self._seen = [(mask, shape, counted, result), *self._seen[:3]]
        return result

    def forget_masks(self) -> None:
        """Drop what belongs to one batch."""
        self._seen.clear()

    def _columns(
        self, record: AttentionRecord, lse: Tensor | None, batch: Tensor, head: Tensor, key: Tensor
    ) -> Float[Tensor, "event query"]:
        if record.weights is not None:
            return record.weights[batch, head, :, key].to(statistics_dtype(record.q))
        assert lse is not None
        return columns(
            record.q,
            record.k,
            lse,
            scale=record.scale,
            mask=record.mask,
            softcap=record.softcap,
            batch=batch,
            head=head,
            key=key,
        )

    def _fields(
        self,
        record: AttentionRecord,
        real: Tensor | None,
        stream: Border | None,
        batch: Tensor,
        head: Tensor,
        key: Tensor,
        weights: Tensor,
        judged: Tensor,
    ) -> dict[str, Tensor]:
        """The measures of each event; heads with several sinks are measured once."""
        dtype = statistics_dtype(record.q)
        seen_by = judged.sum(dim=-1)
        fields = {
            "routed_share": ((weights >= 0.5) & judged).sum(dim=-1) / seen_by,
            "min_attention": weights.masked_fill(~judged, torch.inf).amin(dim=-1)
            if len(weights)
            else weights.new_zeros(0),
        }
        pairs, which = torch.unique(torch.stack([batch, head]), dim=1, return_inverse=True)
        b, h = pairs
        value = record.v[b, h // record.group].to(dtype)
        rows = None if real is None or real.shape[1] != value.shape[1] else real[b]
        raw = torch.linalg.vector_norm(value, dim=-1)
        fields["value_ratio_raw"] = _ratio(raw, rows, which, key)
        root = self._root(record)
        unknown = torch.full((len(which),), torch.nan, dtype=dtype, device=value.device)
        if root is None:
            fields["value_ratio"] = unknown
            root = torch.eye(value.shape[-1], dtype=dtype, device=value.device)
            root = root.expand(record.q.shape[1], -1, -1)
        else:
            projected = torch.linalg.vector_norm(value @ root[h].to(dtype).mT, dim=-1)
            fields["value_ratio"] = _ratio(projected, rows, which, key)
        counted = None if real is None else real[b]
        spectrum = update_spectrum(record.out[b, h], root[h], counted)
        number = float(record.q.shape[2]) if counted is None else counted.sum(dim=-1).to(dtype)
        fields["stable_rank"] = spectrum.stable_rank[which]
        fields["rank_one_energy"] = spectrum.rank_one_energy[which]
        fields["update_norm"] = (spectrum.energy / number).sqrt()[which]
        fields["token_norm_ratio"] = unknown
        if stream is not None and stream.norm.shape == (record.v.shape[0], record.v.shape[2]):
            fields["token_norm_ratio"] = stream.norm[batch, key] / stream.median[batch]
        return fields

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


def _visible(weights: Tensor) -> Bool[Tensor, "batch 1 query key"]:
    """Who sees whom, from the map alone. A key that gets nothing at all has lost to a strong sink
    (its weights underflow), it is not hidden; a triangle of zeros is a causal mask.
    """
    visible = (weights > 0).any(dim=1, keepdim=True)
    lost = ~visible.any(dim=-2, keepdim=True)
    causal = not bool(visible.triu(1).any()) and not bool(visible.tril(-1).logical_not().all())
    return visible | (lost.expand_as(visible).tril() if causal else lost)


def _same(one: AttentionMask, other: AttentionMask) -> bool:
    parts = ("positions", "allowed", "additive")
    return (one.causal, one.offset, one.window) == (other.causal, other.offset, other.window) and (
        all(getattr(one, part) is getattr(other, part) for part in parts)
    )


def _is_causal(count: Seen, real: Tensor | None) -> bool:
    """True where the last real key is seen by one query only, the first by more."""
    row = count.count[0, 0]
    if real is not None:
        longest = int(real.sum(dim=-1).argmax())  # one token alone would tell nothing
        row = count.count[longest, 0][real[longest]]
    return len(row) > 1 and bool(row[-1] <= 1 < row[0])


def _finite_rows(out: Tensor, counted: Tensor | None) -> Bool[Tensor, "batch head"]:
    if counted is not None:
        out = out.masked_fill(~counted[:, None, :, None], 0.0)
    return torch.isfinite(out.sum(dim=(-2, -1), dtype=statistics_dtype(out)))


def _ratio(
    norms: Float[Tensor, "pair key"], real: Tensor | None, which: Tensor, key: Tensor
) -> Float[Tensor, " event"]:
    """|v_s| / mean over the other real tokens of |v_j|; NaN without another token."""
    dtype, norms = norms.dtype, norms.double()  # a large own norm would swallow the others'
    if real is not None:
        norms = norms.masked_fill(~real, 0.0)
        number = real.sum(dim=-1).to(norms.dtype)
    else:
        number = torch.full_like(norms[:, 0], float(norms.shape[1]))
    own = norms[which, key]
    others = (norms.sum(dim=-1)[which] - own) / (number[which] - 1)
    return (own / others).to(dtype)
