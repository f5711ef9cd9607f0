"""A scan's run over its batches.

The way of a batch from the iterable to events.parquet:

1. `feed` (hosts/inputs) makes of the user's inputs batches that are loaded on demand.
2. `Run.observe` goes over them in order. A batch that the store has, measured by the same basis, is
   read; any other is loaded, moved to the model, and its tokens are named (`_prepare`).
3. `capture` (capturing) runs the model on it and calls back for each attention call and block. The
   `Observer` measures them at once: `CallMeter` (measure/call) finds a call's sinks, `SampleSums`
   (measure/sums) adds them up.
4. The batch's `Observed` is written to the store and appended to the scan's total.
5. `assemble` lays the total out as frames (measure/frames); `Scan.save` writes them.

What all batches are measured by (`Basis`) comes from the first sample: the process that measures
the first batch learns it there; any other process reads it from the store, or runs the model on
the first sample.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from sinkwise.attention.screen import Screen
from sinkwise.capturing.capture import capture
from sinkwise.core.layout import TokenLayout
from sinkwise.data.batch import LazyBatch
from sinkwise.diagnosis.rules import Rules
from sinkwise.errors import InputError
from sinkwise.hosts.inputs import batch_size, call, cast, feed, first_sample, moved, tower
from sinkwise.hosts.layouts import token_layout
from sinkwise.hosts.loading.source import source_of
from sinkwise.hosts.sites import attention_sites
from sinkwise.measure.sums import SampleSums
from sinkwise.scanning.assembly import assemble
from sinkwise.scanning.basis import Basis, learn_basis, measure_sites
from sinkwise.scanning.batch_store import BatchStore
from sinkwise.scanning.fingerprint import facts
from sinkwise.scanning.observed import Observed
from sinkwise.scanning.observer import Observer
from sinkwise.scanning.result import Scan


@dataclass(frozen=True, kw_only=True)
class ScanOptions:
    """The options of `sinkwise.scan`, where each is described."""

    rules: Rules | str = "auto"
    screen: Screen | bool = False
    layout: Callable[[Any], TokenLayout] | None = None
    parts: str | Path | None = None
    tell: Callable[[str], None] | None = None

    def event_rules(self) -> Rules:
        """`rules` as an object. Raises InputError for an unknown name."""
        return self.rules if isinstance(self.rules, Rules) else Rules.named(self.rules)

    def screening(self) -> Screen | None:
        """`screen` as an object; None: every call is measured in full."""
        return Screen() if self.screen is True else self.screen or None


class PreparedBatch(NamedTuple):
    """A batch on the model's device, with its tokens named."""

    inputs: Any
    layout: TokenLayout | None
    final: bool
    """Whether the layout is the user's own."""
    samples: int

    def first(self) -> Any:
        """The inputs cut to the first sample."""
        return first_sample(self.inputs, self.samples)


class Run:
    """One scan: feeds the batches to the model, and keeps what was observed."""

    def __init__(self, model: nn.Module, inputs: Any, options: ScanOptions) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(
                f"model is a {type(model).__name__} and must be a torch.nn.Module; "
                "sinkwise.load(name) gives one"
            )
        source = source_of(model)
        self._options = options
        self._rules, self._screen = options.event_rules(), options.screening()
        self._feed = feed(model, inputs)
        self._name = source.spec if source else type(model).__name__
        self._tokenizer = source.tokenizer if source else None
        self._model = tower(model, inputs)
        self._sites = attention_sites(self._model)
        self._observer = Observer(self._model, self._rules, self._screen)
        self._basis: Basis | None = None
        """None until the first batch was observed, here or by another process."""
        parameter = next((p for p in self._model.parameters() if p.is_floating_point()), None)
        self._device = parameter.device if parameter is not None else torch.device("cpu")
        self._dtype = parameter.dtype if parameter is not None else torch.float32
        self._store = self._open_store()

    def _open_store(self) -> BatchStore | None:
        if self._options.parts is None:
            return None
        about = facts(
            self._model,
            self._name,
            self._feed.facts(),
            self._rules,
            self._screen,
            self._options.layout,
            self._device,
        )
        return BatchStore(self._options.parts, about)

    def clean_store(self, world: int = 1) -> None:
        """Remove the batches of other scans from the store, and tell what it has of this one."""
        if self._store is None:
            return
        changed, found = self._store.remove_others(), self._store.count(0, world)
        where = f"{self._store.directory}/"
        line = None
        if found:
            line = f"resuming: {found} finished batches found in {where}"
        elif changed:
            line = f"starting over: {', '.join(changed)} changed since the batches in {where}"
        if line is not None and self._options.tell is not None:
            self._options.tell(line)

    def observe(self, rank: int, world: int) -> Iterator[Observed]:
        """What was observed in each batch of a share, in order."""
        index, first = -1, None
        for index, batch in enumerate(self._feed.batches):
            if index == 0:
                first = batch
            if index % world == rank:
                yield self._stored(index, batch) or self._measured(index, batch, first)
            if self._basis is not None:
                first = None  # its tensors are not needed any more
        if index < 0:
            raise InputError("batches is empty; a scan needs at least one batch")

    def result(self, total: Observed) -> Scan:
        """The finished scan, from all its batches."""
        return assemble(
            total,
            model=self._model,
            name=self._name,
            sites=self._sites,
            rules=self._rules,
            screen=self._screen,
        )

    def _stored(self, index: int, batch: LazyBatch) -> Observed | None:
        """A batch from the store, if it was measured by this scan's basis."""
        found = None if self._store is None else self._store.read(index, _key(batch))
        if found is None:
            return None
        observed, basis = found
        if index == 0:
            self._basis = self._adopted(basis, batch)
        return observed if self._basis in (None, basis) else None

    def _measured(self, index: int, batch: LazyBatch, first: LazyBatch | None) -> Observed:
        """A batch that is measured now, and stored."""
        if index == 0:
            observed, basis = self._measure_first(self._prepare(batch.load()))
        else:
            basis = self._basis or self._basis_of(first)
            observed = self._measure(index, self._prepare(batch.load()), basis)
        self._basis = basis
        if self._store is not None:
            self._store.write(index, _key(batch), observed, basis)
        return observed

    def _measure_first(self, batch: PreparedBatch) -> tuple[Observed, Basis]:
        """The first batch, measured again if weights had to be measured on its first sample."""
        observed = self._measure(0, batch, Basis())
        basis = learn_basis(self._model, self._sites, observed, batch.first)
        if basis.measured:
            observed = self._measure(0, batch, basis)
        return observed, basis

    def _basis_of(self, first: LazyBatch | None) -> Basis:
        """The basis of a scan whose first batch another process measures."""
        assert first is not None
        found = None if self._store is None else self._store.read(0, _key(first))
        if found is not None:
            return self._adopted(found[1], first)
        sample = self._prepare(first.first()).first()
        observed = Observed(SampleSums(samples=1))
        with capture(self._model, observed.note), torch.no_grad():
            call(self._model, sample)
        return learn_basis(self._model, self._sites, observed, lambda: sample)

    def _adopted(self, basis: Basis, first: LazyBatch) -> Basis:
        """The basis of a stored first batch, once the weights that it names are measured."""

        def sample() -> Any:
            return self._prepare(first.first()).first()

        measure_sites(self._model, self._sites, basis, sample)
        return basis

    def _measure(self, index: int, batch: PreparedBatch, basis: Basis) -> Observed:
        """Run the model on a batch and measure it; the first one is checked against its output."""
        observer = self._observer
        with capture(
            self._model,
            observer.on_record,
            on_block=observer.on_block,
            sites=self._sites,
            check=index == 0,
        ) as coverage:
            observer.begin(index, batch.samples, batch.layout, basis, self._device, batch.final)
            with torch.no_grad():
                call(self._model, batch.inputs)
        return observer.end(coverage.silent)

    def _prepare(self, batch: Any) -> PreparedBatch:
        """Move a batch to the model's device and precision, and name its tokens."""
        if isinstance(batch, Mapping):
            batch = dict(batch)
        inputs = cast(moved(batch, self._device), self._dtype)
        layout = None if self._options.layout is None else self._options.layout(inputs)
        final = layout is not None
        if layout is None:
            layout = token_layout(self._model, inputs, self._tokenizer)
        samples = batch_size(inputs) if layout is None else layout.batch
        return PreparedBatch(inputs, layout, final, samples)


def _key(batch: LazyBatch) -> str | None:
    return None if batch.key is None else batch.key()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode; afterwards each module as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
