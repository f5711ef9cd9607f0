"""The sink cache: keys of the first tokens and of the most recent, positions by place."""

import copy
import weakref
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from transformers.cache_utils import Cache

from sinkwise.core.retention import Retention
from sinkwise.errors import InputError
from sinkwise.streaming.attachment import attach
from sinkwise.streaming.call import Call
from sinkwise.streaming.layer import SinkLayer
from sinkwise.streaming.positions.decoder import decoder_of
from sinkwise.streaming.positions.rotary import positions_of
from sinkwise.streaming.rotation import Turning
from sinkwise.streaming.rows import Rows

LONGEST_CHUNK = 256
"""Tokens of one plan at most: each has its own copy of the sinks."""


class SinkCache(Cache):
    """A transformers cache for endless text: `num_sink_tokens` first and `window_length` last keys.

    Positions are places in the cache: with S sinks and a window of W, a query that is token t ≥ S+W
    of its row sees tokens 0 … S−1 at places 0 … S−1 and t−W+1 … t at places S … S+W−1, itself at
    S+W−1. `window_length` counts the query itself, and the cache holds S + W keys a layer; the
    class of that name that transformers removed counted the sinks into its window.

    Pass it as `past_key_values` to the model or to `generate`, turn after turn. Rows are
    padded on any side; each row's sinks are its own first real tokens. A chunk of any length gives
    what its tokens give one by one. Layers with a sliding window of their own keep that window, and
    have no sinks, where other layers have none (`layer_kinds`).

    What is hung on the model acts on calls that carry this cache only, and goes with `close()`, at
    the end of its `with` block, or when the cache is collected. No gradient flows through it.

    Keys of deep layers were computed from what their token saw, evicted tokens included: an
    approximation of recomputing the window, to be compared with it (`sinkwise stream`).

    Raises InputError for a model whose positions are not known or depend on the length of the
    text (dynamic NTK), and for a cache longer than the model's learned positions.

    Reference: Xiao et al., 2023, arXiv 2309.17453.
    """

    layers: list[SinkLayer]  # type: ignore[assignment]

    def __init__(
        self, model: nn.Module, window_length: int = 1020, num_sink_tokens: int = 4
    ) -> None:
        self.retention = Retention(num_sink_tokens, window_length)
        self.decoder = decoder_of(model)
        self.positions = positions_of(self.decoder)
        self._forget()
        self._check_length()
        kept = self.decoder.retentions(self.retention)
        pairs = zip(kept, self.positions.rotary, self.decoder.windows, strict=True)
        super().__init__(
            layers=[
                SinkLayer(retention, rotary, sliding=window is not None)
                for retention, rotary, window in pairs
            ]
        )
        self._others = frozenset(kept) - {self.retention}
        self._least = min(retention.capacity for retention in kept)
        self._attach()

    def _attach(self) -> None:
        self._close = weakref.finalize(self, attach(self))
        self._close.atexit = False

    def _forget(self) -> None:
        self.call: Call | None = None
        """The call in progress."""
        self.during: list[Any] = []
        """Hooks that hang for the time of the call."""
        self.earlier: list[Any] = []
        """Outputs of the parts of a split call before the one in progress."""
        self.rows = Rows(self.retention)
        """How far each row has come."""
        self._turnings: list[Turning] | None = None
        self._failed = False

    def _check_length(self) -> None:
        capacity, known = self.retention.capacity, self.positions
        if known.learned is not None and capacity > known.learned:
            raise InputError(
                f"num_sink_tokens + window_length = {capacity} is more than the {known.learned} "
                f"positions that {type(self.decoder.base).__name__} has learned"
            )
        highest = capacity + self.rows.ahead + LONGEST_CHUNK
        if known.limit is not None and highest > known.limit:
            raise InputError(
                f"num_sink_tokens + window_length = {capacity} reaches position {highest}, and "
                f"from {known.limit} on {type(self.decoder.base).__name__} changes its frequencies "
                "(LongRoPE): keys of before and after do not fit together; lower window_length"
            )

    @property
    def layer_kinds(self) -> list[str]:
        """What each layer keeps: `sinks + window`, or `sliding window` of its own."""
        return [
            "sinks + window" if layer.retention == self.retention else "sliding window"
            for layer in self.layers
        ]

    @property
    def seen(self) -> Int[Tensor, " batch"]:
        """Real tokens that each row has had; seen = kept + evicted."""
        return torch.tensor(self.rows.seen or (), dtype=torch.int64)

    @property
    def kept(self) -> Int[Tensor, " batch"]:
        """Tokens of each row that are in the layers with sinks."""
        return self.retention.kept(self.seen)

    @property
    def evicted(self) -> Int[Tensor, " batch"]:
        """Tokens of each row that are gone for good."""
        return self.seen - self.kept

    def split(self, batch: int, length: int, real: Bool[Tensor, "batch query"] | None) -> list[int]:
        """Lengths of the calls that a call is done in: first what evicts nothing, then chunks
        short enough for a copy of the sinks a query.
        """
        self._usable(batch)
        if length == 1:
            return [1]
        sinks = self.retention.num_sink_tokens
        longest = max(16, min(LONGEST_CHUNK, self.retention.window_length // max(sinks, 1)))
        if self.positions.learned is not None:  # some have a table of masks as large
            spare = self.positions.learned - self.retention.capacity
            longest = min(longest, max(1, spare // (sinks + 1)))
        retentions = {self.retention, *self._others}
        room = min(retention.capacity for retention in retentions) - self.rows.most
        first = min(length, max(room, longest))
        sizes = [first]
        while (left := length - sum(sizes)) > 0:
            sizes.append(min(left, longest))
        return sizes

    def _usable(self, batch: int) -> None:
        if not self._close.alive:
            raise InputError("this SinkCache is closed; make a new one")
        if self._failed:
            raise InputError(
                "a call with this SinkCache failed before its end, and some layers have its keys "
                "while others have not; reset() it and feed its text again"
            )
        self.rows.check(batch)

    def begin(self, batch: int, length: int, real: Bool[Tensor, "batch query"] | None) -> Call:
        """Plan a call."""
        tokens = self.rows.tokens(batch, length, real)
        back = self.rows.rebase()
        if back is not None:
            for layer in self.layers:
                layer.rebase(back)
        self.call = Call(tokens, self.retention, self.rows.base, self._others)
        if self.call.steps is not None and tokens.seen[0] >= self.retention.capacity:
            if self._turnings is None:
                self._turnings = Turning.of(self.layers)
            shift = tokens.seen[0] - self.rows.base[0] - (self.retention.capacity - 1)
            for turning in self._turnings:
                turning.write(shift)
        return self.call

    @property
    def needs_mask(self) -> bool:
        """Whether the attention modules must get another mask than the model's in this call."""
        assert self.call is not None
        if self.positions.bias is not None:
            return True
        return self.call.steps is None and any(plan.mask is not None for plan in self.call.plans)

    def position_ids(self, call: Call) -> Int[Tensor, "batch query"]:
        """What the model is to take as positions."""
        if self.positions.learned is None:
            return call.positions()
        return call.tokens.index.clamp(max=self.retention.capacity - 1)

    def end(self, failed: bool) -> None:
        """Count a call's tokens."""
        assert self.call is not None
        tokens, self.call = self.call.tokens, None
        self._failed = failed
        if not failed:
            self.rows.count(tokens, croppable=self._least)

    @torch.compiler.disable
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values; returns all that its queries attend to.

        What models pass beside them (cosines, positions) is not needed.
        """
        if self.call is None:
            raise InputError(
                "this SinkCache got keys from a model that it is not attached to (or it is closed):"
                " make it with SinkCache(model) for this very model"
            )
        layer = self.layers[layer_idx]
        if self.call.steps is not None:
            return layer.step(key_states, value_states, *self.call.steps[layer.retention])
        plan = self.call.plan(layer.retention)
        turn = None
        if plan.mode != "append" and layer.retention.num_sink_tokens:
            turn = self.call.turn(layer.rotary, key_states)
        keys, values = layer.update(key_states, value_states, plan, turn)
        bias = self.positions.bias
        if bias is not None and (blocks := bias.blocks(plan)) > 1:
            return keys.repeat(1, 1, blocks, 1), values.repeat(1, 1, blocks, 1)
        return keys, values

    @torch.compiler.disable
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen, evicted and padding ones too; within a call, the keys before its own."""
        return self.rows.columns if self.call is None else self.call.past

    @torch.compiler.disable
    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Where the queries of a call stand among the keys that attention gets."""
        return self.get_seq_length(layer_idx)

    @torch.compiler.disable
    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """Number of keys, and how far the first stands from 0 (a tensor of positions in 4.x)."""
        length = len(query_length) if isinstance(query_length, Tensor) else query_length
        if self.call is None:
            return self.rows.columns + length, 0
        columns = self.call.columns(self.layers[layer_idx].retention)
        return columns, self.call.past + length - columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Tokens that the cache takes: no end (−1)."""
        return -1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """The same, as transformers 4 asks for it."""
        return -1

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can still put the cache back: nothing has been evicted."""
        return self.rows.real is not None

    @property
    def batch_size(self) -> int:
        """Rows; −1 before the first call."""
        return -1 if self.rows.seen is None else len(self.rows.seen)

    max_batch_size = batch_size

    @property
    def is_compileable(self) -> bool:
        """False: the plan of a call is made on the CPU."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether it has seen a call."""
        return self.rows.seen is not None

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last columns: −n of them; a positive number is what is to stay (4.x).

        Raises InputError once a token has been evicted, which no roll-back brings back.
        """
        have = self.rows.columns
        stays = tokens_to_remove if tokens_to_remove > 0 else have + tokens_to_remove
        if stays >= have:
            return
        if stays < 0:
            raise InputError(f"crop({tokens_to_remove}): the cache has {have} columns")
        if not self.is_croppable:
            raise InputError(
                f"crop({tokens_to_remove}) on a sink cache that has evicted tokens: what has left "
                "the window is gone. Crop before the first eviction, or feed the text again"
            )
        self.rows.crop(stays)

    def reset(self) -> None:
        """Forget everything that was seen; the cache can be used again."""
        for layer in self.layers:
            layer.reset()
        self._forget()

    def batch_select_indices(self, indices: Int[Tensor, " chosen"]) -> None:
        """Keep these rows, in this order."""
        if self.rows.seen is None:
            return
        chosen = indices.to("cpu")
        self._turnings = None
        for layer in self.layers:
            layer.select(chosen)
        self.rows.select(chosen)

    def reorder_cache(self, beam_idx: Int[Tensor, " chosen"]) -> None:
        """Rows in a new order, as beam search asks for; the sinks' originals go along."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row so many times."""
        if self.rows.seen is not None:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def close(self) -> None:
        """Take everything off the model; the cache cannot be used any more."""
        self._close()

    def __enter__(self) -> "SinkCache":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> "SinkCache":
        """A second cache on the same model, at the same token."""
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        shared = {"decoder", "positions", "retention", "_close", "layers", "_turnings"}
        for name, value in vars(self).items():
            if name not in shared:
                setattr(other, name, copy.deepcopy(value, memo))
        other.decoder, other.positions = self.decoder, self.positions
        other.retention, other._turnings = self.retention, None
        other.layers = [layer.copy() for layer in self.layers]
        other._attach()
        return other
