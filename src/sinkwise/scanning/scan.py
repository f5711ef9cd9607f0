"""Scan: run a model over data once and measure every attention call as it happens."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sinkwise.attention.screen import Screen
from sinkwise.capturing.capture import capture
from sinkwise.core.layout import TokenLayout
from sinkwise.core.records import AttentionRecord
from sinkwise.data.batch import LazyBatch
from sinkwise.diagnosis.rules import Rules
from sinkwise.errors import InputError
from sinkwise.hosts.inputs import batch_size, call, cast, feed, first_sample, moved, tower
from sinkwise.hosts.layouts import token_layout
from sinkwise.hosts.loading.source import source_of
from sinkwise.scanning.batch_store import Parts
from sinkwise.scanning.fingerprint import facts
from sinkwise.scanning.observer import Observed, Observer
from sinkwise.scanning.result import Scan


def scan(
    model: nn.Module,
    batches: Any,
    *,
    rules: Rules | str = "auto",
    screen: Screen | bool = False,
    layout: Callable[[Any], TokenLayout] | None = None,
    progress: Callable[[int], None] | None = None,
    parts: str | Path | None = None,
    tell: Callable[[str], None] | None = None,
) -> Scan:
    """Run `model` once over `batches` and measure all its attention calls as they happen.

    batches: `sinkwise.text(...)`, `sinkwise.images(...)`, or an iterable of what the module takes:
    a tensor, a tuple of positional arguments, or a mapping of keyword arguments.
    rules: `auto`, an event rule's name, or a `Rules` object.
    screen: for long sequences, name the candidates from a sample of the queries, and measure only
    those over all queries. Every reported event is exact; a sink is missed with a probability of at
    most `Screen.miss`; the shares by kind of token become estimates.
    layout: names the tokens of a batch where neither pictures nor token ids tell their kind.
    progress: called after each batch with the number of samples so far.
    parts: a directory for finished batches. A scan that was stopped, started again with the same
    arguments, measures only what is missing there and ends with the same result to the last bit
    (on as many threads). Batches of another model, rules or data are never used: they are removed.
    `sinkwise.scanning.batch_store.remove_parts` removes all of them.
    tell: called with a line when `parts` held finished batches.

    The model runs in eval mode without gradients and comes back as it was. Memory does not grow
    with the number of batches, but for the rows of the result. Raises CaptureError where no
    attention over tokens was seen, InputError for unusable input.
    """
    run = _Run(model, batches, rules, screen, layout, parts)
    run.open_parts(tell)
    total = Observed()
    with _evaluating(model):
        for observed in run.observed(0, 1):
            total.append(observed)
            if progress is not None:
                progress(total.part.samples)
        return run.result(total)


def scan_share(
    model: nn.Module,
    batches: Any,
    *,
    parts: str | Path,
    shard: tuple[int, int],
    rules: Rules | str = "auto",
    screen: Screen | bool = False,
    layout: Callable[[Any], TokenLayout] | None = None,
    progress: Callable[[int], None] | None = None,
    tell: Callable[[str], None] | None = None,
) -> int:
    """Measure one process's share of a scan, keep it in the directory `parts`, and return its
    number of samples.

    shard: (rank, world). Rank r of w processes takes the batches r, r + w, r + 2 w, ... of the same
    `batches`: pictures of other shares are not opened (but for the first one, where weights must be
    measured); of a text the others' tokens are counted only; any other iterable is run through, and
    what is not in the share is dropped. When all processes are done, `scan` with the same arguments
    and `parts` reads everything and gives, to the last bit, what one process would have given.

    Other arguments and errors: see `scan`.
    """
    rank, world = shard
    if not 0 <= rank < world:
        raise InputError(f"shard={shard} is not (rank, world) with 0 <= rank < world")
    run = _Run(model, batches, rules, screen, layout, parts)
    if rank == 0:
        run.open_parts(tell, world)
    samples = 0
    with _evaluating(model):
        for observed in run.observed(rank, world):
            samples += observed.part.samples
            if progress is not None:
                progress(samples)
    return samples


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode; module by module as it was, afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


class _Run:
    """Feeds batches to the model, tells the observer what their tokens are, and keeps parts."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        rules: Rules | str,
        screen: Screen | bool,
        layout: Callable[[Any], TokenLayout] | None,
        parts: str | Path | None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(
                f"model is a {type(model).__name__}; sinkwise.load(name) makes it a module"
            )
        rules = rules if isinstance(rules, Rules) else Rules.named(rules)
        sampled = Screen() if screen is True else screen or None
        source = source_of(model)
        self._feed = feed(model, inputs)
        self._spec = source.spec if source else type(model).__name__
        self._tokenizer = source.tokenizer if source else None
        self._model = tower(model, inputs)
        self._layout = layout
        self._observer = Observer(self._model, rules, sampled)
        parameter = next((p for p in self._model.parameters() if p.is_floating_point()), None)
        self._device = parameter.device if parameter is not None else torch.device("cpu")
        self._dtype = parameter.dtype if parameter is not None else torch.float32
        self._origin: LazyBatch | None = None
        """The very first batch, until what it teaches is learned."""
        self._known = False
        """Whether the observer's basis is known,"""
        self._learned = False
        """and whether the weights that it names are measured."""
        self._parts: Parts | None = None
        if parts is not None:
            data, device = self._feed.facts(), self._device
            told = facts(self._model, self._spec, data, rules, sampled, layout, device)
            self._parts = Parts(parts, told)

    def open_parts(self, tell: Callable[[str], None] | None, world: int = 1) -> None:
        """Remove from the directory of parts what is of no use there, and tell what it held."""
        if self._parts is None:
            return
        changed, found = self._parts.drop_others(), self._parts.count(0, world)
        if tell is not None and found:
            tell(f"going on: {found} of its batches are already in {self._parts.directory}/")
        elif tell is not None and changed:
            tell(
                f"starting over, as {', '.join(changed)} changed since the batches in "
                f"{self._parts.directory}/"
            )

    def observed(self, rank: int, world: int) -> Iterator[Observed]:
        """What was seen in each batch of a share, in their order."""
        index = -1
        for index, batch in enumerate(self._feed.batches):
            if index == 0:
                self._origin = batch
            if index % world == rank:
                yield self._kept(index, batch) or self._measured(index, batch)
        if index < 0:
            raise InputError("batches is empty; a scan needs at least one batch")

    def result(self, total: Observed) -> Scan:
        """The finished scan."""
        self._learn()
        return self._observer.result(total, self._spec)

    def _kept(self, index: int, batch: LazyBatch) -> Observed | None:
        """A batch that is on disk, measured as this process would."""
        if self._parts is None:
            return None
        found = self._parts.read(index, self._key(batch))
        if found is None:
            return None
        observed, basis = found
        if index == 0:
            self._observer.basis, self._known = basis, True
        same = basis == self._observer.basis or not self._known
        return observed if same else None

    def _measured(self, index: int, batch: LazyBatch) -> Observed:
        """A batch that is measured now."""
        if index:
            self._learn()
            observed = self._over(index, batch.load())
        else:
            loaded = batch.load()
            observed = self._over(0, loaded)
            if self._observer.learn(observed, lambda: self._sample(loaded)):
                observed = self._over(0, loaded)
            self._known, self._learned, self._origin = True, True, None
        if self._parts is not None:
            self._parts.write(index, self._key(batch), observed, self._observer.basis)
        return observed

    def _learn(self) -> None:
        """Learn from the first batch of all, which another process may measure or have measured:
        from its first sample alone.
        """
        if self._learned:
            return
        assert self._origin is not None
        if not self._known and self._parts is not None:
            found = self._parts.read(0, self._key(self._origin))
            if found is not None:
                self._observer.basis, self._known = found[1], True
        if self._known:
            if self._observer.basis.measured:
                self._observer.learn_again(self._sample(self._origin.first()))
        else:
            sample = self._sample(self._origin.first())
            self._observer.learn(self._glanced(sample), lambda: sample)
        self._known, self._learned, self._origin = True, True, None

    @staticmethod
    def _key(batch: LazyBatch) -> str | None:
        return None if batch.key is None else batch.key()

    def _sample(self, batch: Any) -> Any:
        """The first sample of a batch, ready for the model."""
        batch = self._prepared(batch)
        return first_sample(batch, self._tokens(batch)[2])

    def _glanced(self, sample: Any) -> Observed:
        """Which modules attend over tokens in one sample, and whether they can be recomputed."""
        observer = self._observer
        observer.begin(None, 0, 1, self._device)

        def on_record(record: AttentionRecord) -> None:
            observer.attends(record)

        with capture(self._model, on_record), torch.no_grad():
            call(self._model, sample)
        return observer.end(())

    def _over(self, index: int, batch: Any) -> Observed:
        """Measure a batch; the very first one is checked against the model's own output."""
        observer = self._observer
        batch = self._prepared(batch)
        tokens, given, size = self._tokens(batch)
        with capture(
            self._model,
            observer.on_record,
            on_block=observer.on_block,
            sites=observer.sites,
            check=index == 0,
        ) as coverage:
            observer.begin(tokens, index, size, self._device, given)
            with torch.no_grad():
                call(self._model, batch)
        return observer.end(coverage.silent)

    def _prepared(self, batch: Any) -> Any:
        """The batch on the model's device, pixels in its precision."""
        if isinstance(batch, Mapping):
            batch = dict(batch)
        return cast(moved(batch, self._device), self._dtype)

    def _tokens(self, batch: Any) -> tuple[TokenLayout | None, bool, int]:
        """What a batch's tokens are, whether the user says so, and how many samples it has."""
        tokens = self._layout(batch) if self._layout is not None else None
        given = tokens is not None
        if tokens is None:
            tokens = token_layout(self._model, batch, self._tokenizer)
        return tokens, given, batch_size(batch) if tokens is None else tokens.batch
