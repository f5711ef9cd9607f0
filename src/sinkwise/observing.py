"""The observer of a scan: measures what a capture hands it, and adds it to tables."""

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from sinkwise.attention.screen import Screen
from sinkwise.errors import CaptureError, InputError
from sinkwise.hosts.blocks import Block
from sinkwise.hosts.inputs import first_sample
from sinkwise.hosts.layouts import is_cross, is_decoder
from sinkwise.hosts.sites import attention_sites
from sinkwise.jacobian import measured_sites
from sinkwise.layout import TokenLayout
from sinkwise.measure.call import CallMeter
from sinkwise.measure.spike import spikes
from sinkwise.measure.stream import StreamCache
from sinkwise.measure.tables import Tables
from sinkwise.records import AttentionRecord
from sinkwise.results import Scan
from sinkwise.rules import Rules
from sinkwise.versions import versions

MIN_QUERIES = 2
"""A call with fewer queries (a pooling head, one generated token) is no attention over tokens."""


class Observer:
    """Receives records and block borders, measures them, and adds them to the tables."""

    def __init__(self, model: nn.Module, rules: Rules, screen: Screen | None = None) -> None:
        self._model = model
        self._rules = rules
        self._two_towers = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", None))
        self.sites = attention_sites(model)
        self.tables = Tables(rules)
        self._meter = CallMeter(rules, screen)
        self._cache = StreamCache()
        self._layout: TokenLayout | None = None
        self._real: Tensor | None = None
        self._given = False
        self._fitted = False
        self._lengths: set[int] = set()
        self._offset = 0
        self._size = 1
        self._seen: dict[str, None] = {}
        self._skipped: set[str] = set()
        self.silent: tuple[str, ...] = ()

    def begin(
        self,
        layout: TokenLayout | None,
        offset: int,
        size: int,
        device: torch.device,
        given: bool = False,
    ) -> None:
        """A new batch: its tokens, the number of its first sample, and its size.

        `given` layouts come from the user and must fit at least one call.
        """
        self._layout, self._offset, self._size, self._given = layout, offset, size, given
        real = None if layout is None else layout.real.to(device)
        self._real = None if real is None or bool(real.all()) else real
        self._meter.forget_masks()

    def on_block(
        self, block: Block, layer: int, before: Tensor, after: Tensor, normed: bool
    ) -> None:
        """A block's input and output."""
        real = None if self._apart(block.name) else self._real
        pair = [self._cache.border(x, real) for x in (before, after)]
        self.tables.add_stream(layer, pair[0], pair[1], real, normed)

    def on_record(self, record: AttentionRecord) -> None:
        """One attention call."""
        batch, _, queries, _ = record.q.shape
        keys = record.k.shape[2]
        if queries < MIN_QUERIES or batch % self._size:
            self._skipped.add(record.name)
            return
        self._seen.setdefault(record.name)
        layout, real = self._layout, self._real
        fits = layout is not None and (layout.batch, layout.length) == (batch, keys)
        self._fitted |= fits
        self._lengths.add(keys)
        if layout is None or not fits or self._apart(record.name):
            layout, real = TokenLayout.uniform("other", batch, keys), None
        if queries != keys:
            real = None
        stream = None
        residual = record.residual
        if residual is not None and residual.shape[1] == keys and not is_cross(record.name):
            stream = self._cache.border(residual, real)
        windows = batch // self._size
        draw = (self._offset * 4099 + record.layer) * 131 + record.call
        stats = self._meter.measure(record, layout.codes, real, stream, draw)
        self.tables.add_call(record.layer, record.name, stats, layout, self._offset, windows)

    def _apart(self, name: str) -> bool:
        """Whether a module of an encoder-decoder works on other tokens than the layout's."""
        return self._two_towers and is_decoder(name)

    def learn_missing_sites(self, batch: Any) -> bool:
        """Measure the weights of modules that no layout knows; True if any was found."""
        missing = [name for name in self._seen if name and name not in self.sites]
        if not missing:
            return False
        one = first_sample(batch, self._size)
        found = measured_sites(self._model, missing, one)
        self.sites.update(found)
        return bool(found)

    def _screening(self) -> dict[str, Any] | None:
        """What a screened scan must say of itself."""
        if self._meter.screen is None:
            return None
        return {**asdict(self._meter.screen), "calls": self._meter.calls}

    def result(self, samples: int, model: str) -> Scan:
        """The finished scan."""
        if not self._seen:
            names = ", ".join(sorted(self._skipped)) or "none"
            raise CaptureError(f"no attention over tokens was seen (calls skipped: {names})")
        if self._given and not self._fitted:
            assert self._layout is not None
            lengths = ", ".join(map(str, sorted(self._lengths)))
            raise InputError(
                f"layout names {self._layout.length} tokens a sample, and the model attends to "
                f"{lengths}"
            )
        for name in self._seen:
            site = self.sites.get(name)
            found = None if site is None else spikes(site)
            if found is not None:
                self.tables.spikes[name] = (found[0].tolist(), found[1])
        events = self.tables.events()
        heads, layers = self.tables.heads(events), self.tables.layers()
        known = {name: self.sites[name] for name in self._seen if name in self.sites}
        meta = {
            "model": model,
            "class": type(self._model).__name__,
            "parameters": sum(p.numel() for p in self._model.parameters()),
            "samples": samples,
            "rules": self._rules.describe(),
            "sites_measured": sorted(n for n, site in known.items() if site.source != "layout"),
            "sites_unknown": sorted(n for n in self._seen if n not in known),
            "output_unknown": sorted(n for n in self._seen if n not in known or known[n].o is None),
            "screen": self._screening(),
            "calls_skipped": sorted(self._skipped),
            "blocks_without_softmax_attention": list(self.silent),
            "nonfinite": int(heads["nonfinite"].sum()),
            "versions": versions(),
        }
        return Scan(events, heads, layers, meta)
