"""The sink cache: the keys of the first and of the most recent tokens, at cache positions."""

import copy
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers.cache_utils import Cache

from sinkwise.core.retention import Retention
from sinkwise.errors import InputError
from sinkwise.streaming.attachment import Attachment
from sinkwise.streaming.layer import SinkLayer
from sinkwise.streaming.plan import LONGEST_CHUNK
from sinkwise.streaming.positions.decoder import decoder_of
from sinkwise.streaming.positions.scheme import positions_of
from sinkwise.streaming.state import CacheState


class SinkCache(Cache):
    r"""A transformers cache of constant size for endless text.

    It keeps the keys and values of the first $S$ tokens (`num_sink_tokens`, the attention sinks)
    and of the last $W$ (`window_length`, which includes the query itself), $S + W$ per layer. The
    tokens between them are evicted. Without the sinks, the attention of most models breaks down
    once the first tokens are out of the window.

    Positions are cache positions. For a query that is token $t \ge S + W$ of its row, token $j$ is
    at position

    $$\begin{cases} j & j < S \\ j - (t - (S + W - 1)) & t - W < j \le t, \end{cases}$$

    so the query is at $S + W - 1$, and no position is ever higher. (The SinkCache that transformers
    removed counted the sinks into its window.)

    Pass it as `past_key_values` to the model or to `generate`, one turn of a conversation after the
    other. Rows may be padded on any side; the sinks of a row are its own first real tokens. A chunk
    of any length gives what its tokens give one by one. Layers with their own sliding window keep
    that window and have no sinks if other layers have full attention (`layer_kinds`).

    The cache attaches hooks to the model, which act only on calls that carry this cache. `close()`,
    the end of a `with` block and garbage collection remove them. No gradient flows through it.

    The keys of deep layers were computed from all that their token saw, including tokens evicted
    since: an approximation of recomputing the window (`sinkwise stream` compares the two).

    Raises InputError for a model whose positions are unknown or depend on the length of the text
    (dynamic NTK), and for a cache longer than the model's learned positions.

    Reference: Xiao et al., 2023, arXiv 2309.17453.
    """

    layers: list[SinkLayer]  # type: ignore[assignment]

    def __init__(
        self, model: nn.Module, window_length: int = 1020, num_sink_tokens: int = 4
    ) -> None:
        self.retention = Retention(num_sink_tokens, window_length)
        self.decoder = decoder_of(model)
        self.positions = positions_of(self.decoder)
        kept = self.decoder.retentions(self.retention)
        pairs = zip(kept, self.positions.rotary, self.decoder.windows, strict=True)
        super().__init__(
            layers=[
                SinkLayer(retention, rotary, sliding=window is not None)
                for retention, rotary, window in pairs
            ]
        )
        self._state = CacheState(self.retention, self.positions, self.layers)
        capacity = self.retention.capacity
        highest = capacity + self._state.rows.ahead + LONGEST_CHUNK
        self.positions.check(capacity, highest, type(self.decoder.base).__name__)
        self._attachment = Attachment(self, self.decoder, self._state)

    @property
    def layer_kinds(self) -> list[str]:
        """What each layer keeps: `sinks + window`, or its own `sliding window`."""
        return [
            "sinks + window" if layer.retention == self.retention else "sliding window"
            for layer in self.layers
        ]

    @property
    def seen(self) -> Int[Tensor, " batch"]:
        """Real tokens of each row so far; seen = kept + evicted."""
        return torch.tensor(self._state.rows.seen or (), dtype=torch.int64)

    @property
    def kept(self) -> Int[Tensor, " batch"]:
        """Tokens of each row that the layers with sinks hold."""
        return self.retention.kept(self.seen)

    @property
    def evicted(self) -> Int[Tensor, " batch"]:
        """Tokens of each row that were evicted."""
        return self.seen - self.kept

    @torch.compiler.disable
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values; return all that its queries attend to.

        Further arguments of the models (cosines, positions) are not needed.
        """
        call = self._attachment.call
        if call is None:
            raise InputError(
                "this SinkCache got keys from a model that it is not attached to, or it is closed; "
                "make one with SinkCache(model) for this model"
            )
        return self._state.store(call, key_states, value_states, layer_idx)

    @torch.compiler.disable
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns so far, evicted and padding ones included; in a call, the keys before its own."""
        call = self._attachment.call
        return self._state.rows.columns if call is None else call.past

    @torch.compiler.disable
    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The offset of a call's queries among the keys that attention gets."""
        return self.get_seq_length(layer_idx)

    @torch.compiler.disable
    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """Number of keys, and the offset of the first (4.x passes a tensor of positions)."""
        length = len(query_length) if isinstance(query_length, Tensor) else query_length
        call = self._attachment.call
        if call is None:
            return self._state.rows.columns + length, 0
        columns = call.columns(self.layers[layer_idx].retention)
        return columns, call.past + length - columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Maximum number of tokens: −1, no limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 4

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can still restore an earlier state: nothing has been evicted."""
        return self._state.rows.real is not None

    @property
    def batch_size(self) -> int:
        """Number of rows; −1 before the first call."""
        return -1 if self._state.rows.seen is None else len(self._state.rows.seen)

    max_batch_size = batch_size

    @property
    def is_compileable(self) -> bool:
        """False: the plan of a call is computed on the CPU."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether it has seen a call."""
        return self._state.rows.seen is not None

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last n columns, given as −n; a positive number is how many stay (4.x).

        Raises InputError once a token has been evicted, which cannot be restored.
        """
        have = self._state.rows.columns
        stays = tokens_to_remove if tokens_to_remove > 0 else have + tokens_to_remove
        if stays >= have:
            return
        if stays < 0:
            raise InputError(f"crop({tokens_to_remove}): the cache has {have} columns")
        if not self.is_croppable:
            raise InputError(
                f"crop({tokens_to_remove}) on a sink cache that has evicted tokens cannot restore "
                "them; crop before the first eviction, or feed the text again"
            )
        self._state.rows.crop(stays)

    def reset(self) -> None:
        """Forget all tokens and any interrupted call; the cache can be used again."""
        self._attachment.reset()
        self._state.reset()

    def batch_select_indices(self, indices: Int[Tensor, " chosen"]) -> None:
        """Keep these rows, in this order."""
        self._state.select(indices)

    def reorder_cache(self, beam_idx: Int[Tensor, " chosen"]) -> None:
        """Reorder the rows, as beam search does."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        if self.is_initialized:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def close(self) -> None:
        """Remove all hooks from the model; the cache cannot be used any more."""
        self._attachment.close()

    def __enter__(self) -> "SinkCache":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> "SinkCache":
        """A second cache on the same model, in the same state."""
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        own = {"decoder", "positions", "retention", "layers", "_state", "_attachment"}
        for name, value in vars(self).items():
            if name not in own:  # attributes of transformers' class
                setattr(other, name, copy.deepcopy(value, memo))
        other.decoder, other.positions, other.retention = (
            self.decoder, self.positions, self.retention,
        )  # fmt: skip
        other._state = self._state.copy()
        other.layers = other._state.layers
        other._attachment = Attachment(other, self.decoder, other._state)
        other._attachment.failed = self._attachment.failed
        return other
