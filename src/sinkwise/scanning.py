"""Scan: run a model over data once and measure every attention call as it happens."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from sinkwise.attention.screen import Screen
from sinkwise.capturing import capture
from sinkwise.errors import InputError
from sinkwise.hosts.inputs import batch_size, batches_for, call, cast, moved, tower
from sinkwise.hosts.layouts import token_layout
from sinkwise.hosts.source import source_of
from sinkwise.layout import TokenLayout
from sinkwise.measure.tables import Tables
from sinkwise.observing import Observer
from sinkwise.results import Scan
from sinkwise.rules import Rules


def scan(
    model: nn.Module,
    batches: Any,
    *,
    rules: Rules | str = "auto",
    screen: Screen | bool = False,
    layout: Callable[[Any], TokenLayout] | None = None,
    progress: Callable[[int], None] | None = None,
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

    The model runs in eval mode without gradients and comes back as it was. Memory does not grow
    with the number of batches, but for the rows of the result. Raises CaptureError where no
    attention over tokens was seen, InputError for unusable input.
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model is a {type(model).__name__}; sinkwise.load(name) makes it a module"
        )
    if not isinstance(rules, Rules):
        rules = Rules.named(rules)
    source = source_of(model)
    feed = batches_for(model, batches)
    model = tower(model, batches)
    observer = Observer(model, rules, Screen() if screen is True else screen or None)
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

    def __init__(
        self,
        model: nn.Module,
        observer: Observer,
        layout: Callable[[Any], TokenLayout] | None,
        tokenizer: Any,
        progress: Callable[[int], None] | None,
    ) -> None:
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
        if isinstance(batch, Mapping):
            batch = dict(batch)
        return cast(moved(batch, self._device), self._dtype)

    def over(self, batches: Iterable[Any], check: bool) -> None:
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
                tokens = self._layout(batch) if self._layout is not None else None
                given = tokens is not None
                if tokens is None:
                    tokens = token_layout(self._model, batch, self._tokenizer)
                size = tokens.batch if tokens is not None else batch_size(batch)
                observer.begin(tokens, self.samples, size, self._device, given)
                with torch.no_grad():
                    call(self._model, batch)
                self.samples += size
                if self._progress is not None:
                    self._progress(self.samples)
        observer.silent = coverage.silent
