"""Scan: run a model over data once and measure every attention call as it happens."""

import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import Tensor, nn

from sinkwise.capturing import capture
from sinkwise.errors import CaptureError, InputError
from sinkwise.hosts.blocks import Block
from sinkwise.hosts.inputs import (
    batch_size,
    batches_for,
    call,
    cast,
    first_sample,
    moved,
    tower,
)
from sinkwise.hosts.layouts import token_layout
from sinkwise.hosts.sites import attention_sites
from sinkwise.hosts.source import source_of
from sinkwise.jacobian import measured_sites
from sinkwise.layout import TokenLayout
from sinkwise.measure.call import CallMeter
from sinkwise.measure.spike import spikes
from sinkwise.measure.stream import StreamCache
from sinkwise.measure.tables import Tables
from sinkwise.records import AttentionRecord
from sinkwise.rules import ModelRule, Rules
from sinkwise.verdict import Verdict, judge
from sinkwise.versions import versions

FRAMES = ("events", "heads", "layers")
MIN_QUERIES = 2
"""A call with fewer queries (a pooling head, one generated token) is no attention over tokens."""


@dataclass(frozen=True, eq=False)
class Scan:
    """Result of a scan: three frames, and everything needed to read them again."""

    events: pl.DataFrame
    """One row a sample, layer, head and sink."""
    heads: pl.DataFrame
    """One row a layer and head."""
    layers: pl.DataFrame
    """One row a layer."""
    meta: dict[str, Any]
    """Model, rules, versions, counts."""

    def verdict(self) -> Verdict:
        """Which mechanisms dominate where, and what to do about it."""
        rule = ModelRule(**self.meta["rules"]["model"])
        return judge(self.heads, self.events, self.layers, rule)

    def save(self, directory: str | Path) -> Path:
        """Write {events,heads,layers}.parquet and scan.json into `directory`, all or nothing.

        An existing scan there is replaced; any other non-empty directory is refused.
        Raises InputError when the place cannot be written (a full disk, say).
        """
        target = check_target(directory)
        temporary = None
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
            for name in FRAMES:
                getattr(self, name).write_parquet(temporary / f"{name}.parquet")
            text = json.dumps(self.meta, indent=2, ensure_ascii=False) + "\n"
            (temporary / "scan.json").write_text(text, encoding="utf-8")
            if target.exists():
                old = temporary / "replaced"
                os.replace(target, old)
            os.replace(temporary, target)
            shutil.rmtree(target / "replaced", ignore_errors=True)
            return target
        except (OSError, pl.exceptions.PolarsError) as error:
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise InputError(f"out={str(target)!r} could not be written: {reason}") from error
        finally:
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)

    @classmethod
    def load(cls, directory: str | Path) -> "Scan":
        """Read what `save` wrote. Raises InputError where `directory` holds no scan."""
        source = Path(directory)
        try:
            meta = json.loads((source / "scan.json").read_text(encoding="utf-8"))
            frames = {name: pl.read_parquet(source / f"{name}.parquet") for name in FRAMES}
        except (OSError, ValueError, pl.exceptions.PolarsError) as error:
            raise InputError(f"{str(source)!r} is no saved scan: {error}") from error
        return cls(**frames, meta=meta)


def check_target(directory: str | Path) -> Path:
    """The directory as a path, if a scan can be saved there: new, empty, or an earlier scan.

    Raises InputError otherwise.
    """
    target = Path(directory)
    if target.exists():
        free = target.is_dir() and ((target / "scan.json").exists() or not any(target.iterdir()))
        if not free:
            raise InputError(f"out={str(target)!r} exists and is no scan; name a new directory")
    return target


def scan(
    model: nn.Module,
    batches: Any,
    *,
    rules: Rules | str = "auto",
    layout: Callable[[Any], TokenLayout] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Scan:
    """Run `model` once over `batches` and measure all its attention calls as they happen.

    batches: `sinkwise.text(...)`, `sinkwise.images(...)`, or an iterable of what the module takes:
    a tensor, a tuple of positional arguments, or a dict of keyword arguments.
    rules: `auto`, an event rule's name, or a `Rules` object.
    layout: names the tokens of a batch where neither pictures nor token ids tell their kind.
    progress: called after each batch with the number of samples so far.

    The model runs in eval mode without gradients and comes back as it was. Memory does not grow
    with the number of batches, but for the rows of the result. Raises CaptureError where no
    attention over tokens was seen, InputError for unusable input.
    """
    rules = Rules.named(rules) if isinstance(rules, str) else rules
    source = source_of(model)
    feed = batches_for(model, batches)
    model = tower(model, batches)
    observer = _Observer(model, rules)
    run = _Run(model, observer, layout, source.tokenizer if source else None, progress)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        first = next(feed, None)
        if first is None:
            raise InputError("batches is empty; a scan needs at least one batch")
        run.over([first], check=True)
        if observer.learn_missing_sites(run.prepare(first)):
            observer.tables = Tables(rules)
            run.samples = 0
            run.over([first], check=False)
        second = next(feed, None)
        if second is not None:
            run.over(itertools.chain([second], feed), check=False)
    finally:
        for module, mode in modes:
            module.training = mode
    return observer.result(run.samples, source.spec if source else type(model).__name__)


class _Run:
    """Feeds batches to the model and tells the observer what their tokens are."""

    def __init__(self, model, observer, layout, tokenizer, progress) -> None:
        self._model = model
        self._observer = observer
        self._layout = layout
        self._tokenizer = tokenizer
        self._progress = progress
        parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
        self._device = parameter.device if parameter is not None else torch.device("cpu")
        self._dtype = parameter.dtype if parameter is not None else torch.float32
        self.samples = 0

    def prepare(self, batch: Any) -> Any:
        """The batch on the model's device, pixels in its precision."""
        return cast(moved(batch, self._device), self._dtype)

    def over(self, batches, check: bool) -> None:
        """Measure these batches."""
        observer = self._observer
        with capture(
            self._model,
            observer.on_record,
            on_block=observer.on_block,
            sites=observer.sites,
            check=check,
        ) as coverage:
            for batch in batches:
                batch = self.prepare(batch)
                tokens = self._layout(batch) if self._layout else None
                if tokens is None:
                    tokens = token_layout(self._model, batch, self._tokenizer)
                size = tokens.batch if tokens is not None else batch_size(batch)
                observer.begin(tokens, self.samples, size, self._device)
                with torch.no_grad():
                    call(self._model, batch)
                self.samples += size
                if self._progress is not None:
                    self._progress(self.samples)
        observer.silent = coverage.silent


class _Observer:
    """Receives records and block borders, measures them, and adds them to the tables."""

    def __init__(self, model: nn.Module, rules: Rules) -> None:
        self._model = model
        self._rules = rules
        self.sites = attention_sites(model)
        self.tables = Tables(rules)
        self._meter = CallMeter(rules)
        self._cache = StreamCache()
        self._layout: TokenLayout | None = None
        self._real: Tensor | None = None
        self._offset = 0
        self._size = 1
        self._seen: dict[str, None] = {}
        self._skipped: set[str] = set()
        self.silent: tuple[str, ...] = ()

    def begin(
        self, layout: TokenLayout | None, offset: int, size: int, device: torch.device
    ) -> None:
        """A new batch: its tokens, the number of its first sample, and its size."""
        self._layout, self._offset, self._size = layout, offset, size
        real = None if layout is None else layout.real.to(device)
        self._real = None if real is None or bool(real.all()) else real
        self._meter.forget_masks()

    def on_block(self, block: Block, before: Tensor, after: Tensor, normed: bool) -> None:
        """A block's input and output."""
        real = self._real
        pair = [self._cache.border(x, real) for x in (before, after)]
        self.tables.add_stream(block.layer, pair[0], pair[1], real, normed)

    def on_record(self, record: AttentionRecord) -> None:
        """One attention call."""
        batch, _, queries, _ = record.q.shape
        keys = record.k.shape[2]
        if queries < MIN_QUERIES or batch % self._size:
            self._skipped.add(record.name)
            return
        self._seen.setdefault(record.name)
        layout, real = self._layout, self._real
        if layout is None or (layout.batch, layout.length) != (batch, keys):
            layout = TokenLayout.uniform("other", batch, keys)
            real = None
        if queries != keys:
            real = None
        stream = None
        if record.residual is not None and record.residual.shape[1] == keys:
            stream = self._cache.border(record.residual, real)
        stats = self._meter.measure(record, layout.codes, real, stream)
        windows = batch // self._size
        self.tables.add_call(record.layer, record.name, stats, layout, self._offset, windows)

    def learn_missing_sites(self, batch: Any) -> bool:
        """Measure the weights of modules that no layout knows; True if any was found."""
        missing = [name for name in self._seen if name and name not in self.sites]
        if not missing:
            return False
        one = first_sample(batch, self._size)
        found = measured_sites(self._model, missing, one)
        self.sites.update(found)
        return bool(found)

    def result(self, samples: int, model: str) -> Scan:
        """The finished scan."""
        if not self._seen:
            names = ", ".join(sorted(self._skipped)) or "none"
            raise CaptureError(f"no attention over tokens was seen (calls skipped: {names})")
        for name in self._seen:
            site = self.sites.get(name)
            found = None if site is None else spikes(site)
            if found is not None:
                self.tables.spikes[name] = (found[0].tolist(), found[1])
        events = self.tables.events()
        heads, layers = self.tables.heads(events), self.tables.layers()
        measured = sorted(
            n for n in self._seen if n in self.sites and self.sites[n].source != "layout"
        )
        meta = {
            "model": model,
            "class": type(self._model).__name__,
            "parameters": sum(p.numel() for p in self._model.parameters()),
            "samples": samples,
            "rules": self._rules.describe(),
            "sites_measured": measured,
            "sites_unknown": sorted(n for n in self._seen if n not in self.sites),
            "calls_skipped": sorted(self._skipped),
            "blocks_without_softmax_attention": list(self.silent),
            "nonfinite": int(heads["nonfinite"].sum()),
            "versions": versions(),
        }
        return Scan(events, heads, layers, meta)
