"""The observer of a scan: measures what a capture hands it, a batch at a time."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sinkwise.attention.screen import Screen
from sinkwise.capturing.jacobian import measured_sites
from sinkwise.core.layout import TokenLayout
from sinkwise.core.records import AttentionRecord
from sinkwise.diagnosis.rules import Rules
from sinkwise.errors import CaptureError, InputError
from sinkwise.hosts.blocks import Block
from sinkwise.hosts.cross_attention import is_cross, is_decoder
from sinkwise.hosts.sites import attention_sites
from sinkwise.measure.call import CallMeter
from sinkwise.measure.frames import Tables
from sinkwise.measure.residual import StreamCache
from sinkwise.measure.spike import spikes
from sinkwise.measure.sums import Part
from sinkwise.scanning.result import Scan
from sinkwise.storage.versions import versions

MIN_QUERIES = 2
"""A call with fewer queries (a pooling head, one generated token) is no attention over tokens."""


@dataclass(frozen=True)
class Basis:
    """What the first batch taught, and all batches are measured by."""

    measured: tuple[str, ...] = ()
    """Modules whose weights no layout knows, and the Jacobian does."""
    doubtful: tuple[str, ...] = ()
    """Modules whose captured fields do not tell the whole score."""


@dataclass(eq=False)
class Observed:
    """What a scan keeps of some batches beside the statistics, to be joined in their order."""

    part: Part = field(default_factory=Part)
    seen: dict[str, None] = field(default_factory=dict)
    """Modules that attended over tokens."""
    skipped: set[str] = field(default_factory=set)
    """Modules whose calls were no attention over tokens."""
    silent: dict[str, None] = field(default_factory=dict)
    """Blocks that ran without softmax attention."""
    doubtful: set[str] = field(default_factory=set)
    """Modules with a record that is not faithful."""
    lengths: set[int] = field(default_factory=set)
    """Numbers of keys."""
    given: int | None = None
    """Length of the user's own layout."""
    fitted: bool = False
    """Whether a call was as long as its layout."""
    calls: dict[str, int] = field(default_factory=dict)
    """Calls by the way in which they were measured."""

    def append(self, later: "Observed") -> None:
        """Join the batches that follow."""
        self.part.append(later.part)
        self.seen |= later.seen
        self.silent |= later.silent
        self.skipped |= later.skipped
        self.doubtful |= later.doubtful
        self.lengths |= later.lengths
        self.given = self.given if later.given is None else later.given
        self.fitted |= later.fitted
        for name, count in later.calls.items():
            self.calls[name] = self.calls.get(name, 0) + count


class Observer:
    """Receives records and block borders of one batch after another, and measures them."""

    def __init__(self, model: nn.Module, rules: Rules, screen: Screen | None = None) -> None:
        self._model = model
        self._rules = rules
        self._two_towers = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", None))
        self.sites = attention_sites(model)
        self.basis = Basis()
        self.now = Observed()
        """What was seen since `begin`."""
        self._meter = CallMeter(rules, screen)
        self._cache = StreamCache()
        self._layout: TokenLayout | None = None
        self._real: Tensor | None = None
        self._index = 0
        self._size = 1

    def begin(
        self,
        layout: TokenLayout | None,
        index: int,
        size: int,
        device: torch.device,
        given: bool = False,
    ) -> None:
        """A new batch: its tokens, its number, and how many samples it has.

        `given` layouts come from the user and must fit at least one call.
        """
        self.now = Observed(Part(samples=size))
        if layout is not None and given:
            self.now.given = layout.length
        self._meter.calls = dict.fromkeys(self._meter.calls, 0)
        self._layout, self._index, self._size = layout, index, size
        real = None if layout is None else layout.real.to(device)
        self._real = None if real is None or bool(real.all()) else real
        self._meter.forget_masks()

    def end(self, silent: Iterable[str]) -> Observed:
        """The batch is over; `silent` are its blocks without softmax attention."""
        self.now.silent = dict.fromkeys(silent)
        self.now.calls = dict(self._meter.calls)
        return self.now

    def on_block(
        self, block: Block, layer: int, before: Tensor, after: Tensor, normed: bool
    ) -> None:
        """A block's input and output."""
        real = None if self._apart(block.name) else self._real
        pair = [self._cache.border(x, real) for x in (before, after)]
        self.now.part.add_stream(layer, pair[0], pair[1], real, normed)

    def on_record(self, record: AttentionRecord) -> None:
        """One attention call."""
        if not self.attends(record):
            return
        batch, _, queries, _ = record.q.shape
        keys = record.k.shape[2]
        if record.name in self.basis.doubtful:
            record.faithful = False
        layout, real = self._layout, self._real
        fits = layout is not None and (layout.batch, layout.length) == (batch, keys)
        self.now.fitted |= fits
        self.now.lengths.add(keys)
        if layout is None or not fits or self._apart(record.name):
            layout, real = TokenLayout.uniform("other", batch, keys), None
        if queries != keys:
            real = None
        stream = None
        residual = record.residual
        if residual is not None and residual.shape[1] == keys and not is_cross(record.name):
            stream = self._cache.border(residual, real)
        windows = batch // self._size
        draw = (self._index * 4099 + record.layer) * 131 + record.call
        stats = self._meter.measure(record, layout.codes, real, stream, draw)
        self.now.part.add_call(record.layer, record.name, stats, layout, windows)

    def attends(self, record: AttentionRecord) -> bool:
        """Whether a call is attention over tokens; its module's name is kept either way."""
        if record.q.shape[2] < MIN_QUERIES or record.q.shape[0] % self._size:
            self.now.skipped.add(record.name)
            return False
        self.now.seen.setdefault(record.name)
        if not record.faithful:
            self.now.doubtful.add(record.name)
        return True

    def _apart(self, name: str) -> bool:
        """Whether a module of an encoder-decoder works on other tokens than the layout's."""
        return self._two_towers and is_decoder(name)

    def learn(self, first: Observed, sample: Callable[[], Any]) -> bool:
        """Learn what all batches are measured by from the first one, and measure the weights that
        no layout knows on its first sample. True if there are any.
        """
        missing = [name for name in first.seen if name and name not in self.sites]
        found = measured_sites(self._model, missing, sample()) if missing else {}
        self.sites.update(found)
        self.basis = Basis(tuple(sorted(found)), tuple(sorted(first.doubtful)))
        return bool(found)

    def learn_again(self, sample: Any) -> None:
        """Measure the weights that `basis` names, as an earlier process has, on the same sample."""
        missing = [name for name in self.basis.measured if name not in self.sites]
        self.sites.update(measured_sites(self._model, missing, sample))

    def result(self, total: Observed, model: str) -> Scan:
        """The finished scan."""
        if not total.seen:
            names = ", ".join(sorted(total.skipped)) or "none"
            raise CaptureError(f"no attention over tokens was seen (calls skipped: {names})")
        if total.given is not None and not total.fitted:
            lengths = ", ".join(map(str, sorted(total.lengths)))
            raise InputError(
                f"layout names {total.given} tokens a sample, and the model attends to {lengths}"
            )
        known = {name: self.sites[name] for name in total.seen if name in self.sites}
        shapes = {}
        for name, site in known.items():
            found = spikes(site)
            if found is not None:
                shapes[name] = (found[0].tolist(), found[1])
        tables = Tables(total.part, self._rules, shapes)
        events = tables.events()
        heads, layers = tables.heads(events), tables.layers()
        screen = self._meter.screen
        meta = {
            "model": model,
            "class": type(self._model).__name__,
            "parameters": sum(p.numel() for p in self._model.parameters()),
            "samples": total.part.samples,
            "rules": self._rules.describe(),
            "sites_measured": sorted(n for n, site in known.items() if site.source != "layout"),
            "sites_unknown": sorted(n for n in total.seen if n not in known),
            "output_unknown": sorted(n for n in total.seen if n not in known or known[n].o is None),
            "screen": None if screen is None else {**asdict(screen), "calls": total.calls},
            "calls_skipped": sorted(total.skipped),
            "blocks_without_softmax_attention": _silent(total),
            "nonfinite": int(heads["nonfinite"].sum()),
            "versions": versions(),
        }
        return Scan(events, heads, layers, meta)


def _silent(total: Observed) -> list[str]:
    """Blocks that ran without softmax attention in some batch, and attended in none."""
    heard = [f"{name}." for name in (*total.seen, *total.skipped)]
    return [
        block for block in total.silent if not any(name.startswith(f"{block}.") for name in heard)
    ]
