"""The observer of a scan: measures the attention calls and blocks of one batch after another."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from sinkwise.attention.screen import Screen
from sinkwise.core.layout import TokenLayout
from sinkwise.core.records import AttentionRecord
from sinkwise.diagnosis.rules import Rules
from sinkwise.hosts.blocks import Block
from sinkwise.hosts.cross_attention import is_cross, is_decoder
from sinkwise.measure.call import CallMeter
from sinkwise.measure.call_tokens import CallTokens
from sinkwise.measure.residual import ResidualCache
from sinkwise.measure.sums import SampleSums
from sinkwise.scanning.basis import Basis
from sinkwise.scanning.observed import Observed


class Observer:
    """Receives the attention records and blocks of one batch after another, and measures them."""

    def __init__(self, model: nn.Module, rules: Rules, screen: Screen | None = None) -> None:
        config = getattr(model, "config", None)
        self._encoder_decoder = bool(getattr(config, "is_encoder_decoder", None))
        self._meter = CallMeter(rules, screen)
        self._residuals = ResidualCache()
        # The current batch:
        self._observed = Observed()
        self._basis = Basis()
        self._index = 0
        self._tokens: CallTokens | None = None
        """Those of the layout, for calls whose queries and keys they are."""

    def begin(
        self,
        index: int,
        samples: int,
        layout: TokenLayout | None,
        basis: Basis,
        device: torch.device,
        final: bool = False,
    ) -> None:
        """Begin batch number `index` of so many samples, whose tokens are named by `layout`.

        A `final` layout is the user's: its kinds stay, and it must fit at least one call.
        """
        self._observed = Observed(SampleSums(samples=samples))
        if layout is not None and final:
            self._observed.layout_length = layout.length
        self._index, self._basis, self._tokens = index, basis, None
        if layout is not None:
            real = None if bool(layout.real.all()) else layout.real.to(device)
            self._tokens = CallTokens(layout.codes, real, real, final)
        self._meter.visibility.clear()

    def end(self, silent: Iterable[str]) -> Observed:
        """End the batch; `silent` names its blocks without softmax attention."""
        self._observed.silent = dict.fromkeys(silent)
        return self._observed

    def on_block(
        self, block: Block, layer: int, before: Tensor, after: Tensor, normed: bool
    ) -> None:
        """Measure the residual stream before and after a block."""
        real = None
        if self._tokens is not None and not self._has_other_tokens(block.name):
            real = self._tokens.real_keys
        states = [self._residuals.statistics(x, real) for x in (before, after)]
        self._observed.sums.add_block(layer, states[0], states[1], real, normed)

    def on_record(self, record: AttentionRecord) -> None:
        """Measure one attention call."""
        observed = self._observed
        observed.note(record)
        if not observed.attends(record):
            return
        if record.name in self._basis.unfaithful:
            record.faithful = False
        batch, keys = record.q.shape[0], record.k.shape[2]
        observed.key_lengths.add(keys)
        tokens = self._tokens_of(record)
        x, residual = record.residual, None
        if x is not None and x.shape[1] == keys and not is_cross(record.name):
            residual = self._residuals.statistics(x, tokens.real_keys)
        call_seed = (self._index * 4099 + record.layer) * 131 + record.call
        statistics = self._meter.measure(record, tokens, residual, call_seed)
        observed.calls["screened" if statistics.screened else "exact"] += 1
        windows = batch // observed.sums.samples
        observed.sums.add_call(record.layer, record.name, statistics, windows)

    def _tokens_of(self, record: AttentionRecord) -> CallTokens:
        """The tokens of a call: the layout's, if there are as many, else of unknown kind."""
        batch, _, queries, _ = record.q.shape
        keys = record.k.shape[2]
        tokens = self._tokens
        fits = tokens is not None and tokens.codes.shape == (batch, keys)
        self._observed.layout_fits |= fits
        if tokens is None or not fits or self._has_other_tokens(record.name):
            return CallTokens(TokenLayout.uniform("other", batch, keys).codes)
        # Where the queries are not the tokens of the keys, no padding is known of either.
        return tokens if queries == keys else CallTokens(tokens.codes, final=tokens.final)

    def _has_other_tokens(self, name: str) -> bool:
        """Whether a module of an encoder-decoder works on other tokens than the layout's."""
        return self._encoder_decoder and is_decoder(name)
