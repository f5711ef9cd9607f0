"""One layer's keys and values in a sink cache: a buffer whose rows never move."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from sinkwise.attention.rotary import Rotary
from sinkwise.core.retention import Retention
from sinkwise.errors import InputError
from sinkwise.streaming.plan import Plan

Keys = Float[Tensor, "batch kv_head key head_dim"]
Values = Float[Tensor, "batch kv_head key value_dim"]
Columns = Float[Tensor, "batch kv_head column head_dim"]
ValueColumns = Float[Tensor, "batch kv_head column value_dim"]
FIRST_ROWS = 64
"""Initial number of slots of a buffer, which doubles until it holds the whole cache."""


class SinkLayer(CacheLayerMixin):
    """Slots 0 … S − 1 hold the sinks, the other W are a ring.

    Keys are stored as the model rotated them. Only the sinks are re-rotated, each time from their
    float32 originals, so that their distance to the query is that of the cache positions.
    """

    def __init__(self, retention: Retention, rotary: Rotary | None, sliding: bool) -> None:
        super().__init__()
        self.retention = retention
        self.rotary = rotary
        self.is_sliding = sliding
        self.sinks: Keys | None = None
        """Rotated coordinates of the original sink keys, in at least float32."""
        self.quarters: Keys | None = None
        """The same, every pair rotated by 90°."""

    def __repr__(self) -> str:
        kind = "sliding" if self.is_sliding else "sinks"
        return f"SinkLayer({kind}, {self.retention})"

    def lazy_initialization(self, key_states: Keys, value_states: Values | None = None) -> None:
        """Create buffers with the shape and dtype of these keys and values."""
        assert value_states is not None
        self.keys = key_states.new_empty(*key_states.shape[:2], 0, key_states.shape[3])
        self.values = value_states.new_empty(*value_states.shape[:2], 0, value_states.shape[3])
        self.dtype, self.device = key_states.dtype, key_states.device
        if self.rotary is not None:
            part = key_states[:, :, :0, self.rotary.coordinates]
            shape = (*part.shape[:2], self.retention.num_sink_tokens, part.shape[3])
            working = torch.promote_types(self.dtype, torch.float32)
            self.sinks = torch.zeros(shape, dtype=working, device=self.device)
            self.quarters = torch.zeros_like(self.sinks)
        self.is_initialized = True

    def update(
        self, key_states: Keys, value_states: Values, *args: Any, **kwargs: Any
    ) -> tuple[Columns, ValueColumns]:
        """Store a call's keys and values by its plan; return all that its queries attend to."""
        plan, rotation = args
        if key_states.requires_grad or value_states.requires_grad:
            key_states, value_states = key_states.detach(), value_states.detach()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        if len(key_states) != len(self.keys):
            raise InputError(
                f"this call has {len(key_states)} rows and the cache holds {len(self.keys)}; give "
                "the same rows, or reset() the cache"
            )
        self._reserve(min(max(plan.tokens.after), self.retention.capacity))
        self._store_originals(key_states, plan)
        if plan.mode == "chunk":
            out = self._joined(key_states, value_states, plan, rotation)
            self._write(key_states, value_states, plan)
            return out
        self._write(key_states, value_states, plan)
        if plan.mode == "step":
            self._rotate_sinks(rotation)
        if plan.columns == self.keys.shape[2]:
            return self.keys, self.values
        return self.keys.narrow(2, 0, plan.columns), self.values.narrow(2, 0, plan.columns)

    def step(
        self, key_states: Keys, value_states: Values, slot: int, columns: int
    ) -> tuple[Columns, ValueColumns]:
        """`update` for one token per row, if all rows are at the same token and the sinks are
        stored and re-rotated already: it is written to `slot`, and `columns` columns are returned.
        """
        assert self.keys is not None and self.values is not None
        if key_states.requires_grad or value_states.requires_grad:
            key_states, value_states = key_states.detach(), value_states.detach()
        if columns > self.keys.shape[2]:
            self._reserve(columns)
        self.keys.narrow(2, slot, 1).copy_(key_states)
        self.values.narrow(2, slot, 1).copy_(value_states)
        if columns == self.keys.shape[2]:
            return self.keys, self.values
        return self.keys.narrow(2, 0, columns), self.values.narrow(2, 0, columns)

    @property
    def sink_rows(self) -> Keys:
        """The rows of the buffer that hold the sinks."""
        assert self.keys is not None
        return self.keys.narrow(2, 0, self.retention.num_sink_tokens)

    def _reserve(self, rows: int) -> None:
        """Make room for at least that many rows."""
        assert self.keys is not None and self.values is not None
        have = self.keys.shape[2]
        if rows > have:
            size = min(self.retention.capacity, max(rows, 2 * have, FIRST_ROWS))
            for name in ("keys", "values"):
                old = getattr(self, name)
                new = old.new_zeros(*old.shape[:2], size, old.shape[3])
                new[:, :, :have] = old
                setattr(self, name, new)

    def _store_originals(self, keys: Keys, plan: Plan) -> None:
        """Store the originals of the sinks among these keys."""
        sinks = self.retention.num_sink_tokens
        if self.rotary is None or min(plan.tokens.seen) >= sinks:
            return
        assert self.sinks is not None and self.quarters is not None
        rows, numbers, slots = plan.stored
        first = slots < sinks
        rows, numbers, slots = rows[first], numbers[first], slots[first]
        part = keys[rows, :, numbers][..., self.rotary.coordinates].to(self.sinks.dtype)
        self.sinks[rows, :, slots] = part
        self.quarters[rows, :, slots] = self.rotary.quarter(part)

    def _write(self, keys: Keys, values: Values, plan: Plan) -> None:
        """Write the keys and values that stay into their slots."""
        assert self.keys is not None and self.values is not None
        seen, length = plan.tokens.seen[0], plan.tokens.length
        for buffer, new in ((self.keys, keys), (self.values, values)):
            if plan.tokens.uniform and plan.mode == "append":
                buffer.narrow(2, seen, length).copy_(new)
            else:
                rows, numbers, slots = plan.stored
                buffer[rows, :, slots] = new[rows, :, numbers]

    def _rotate_sinks(self, rotation: tuple[Tensor, Tensor] | None) -> None:
        """Write the sinks as the query of a step sees them; rows may be at different tokens."""
        if rotation is not None and self.retention.num_sink_tokens:
            assert self.rotary is not None
            rotated = self._rotated(rotation)[:, :, 0]
            self.sink_rows[..., self.rotary.coordinates].copy_(rotated)

    def _rotated(
        self, rotation: tuple[Tensor, Tensor]
    ) -> Float[Tensor, "batch kv_head query key rotated"]:
        """The sinks' rotated coordinates for each query."""
        assert self.sinks is not None and self.quarters is not None
        cos, sin = (part[..., None, :] for part in rotation)
        return torch.addcmul(self.sinks[:, :, None] * cos, self.quarters[:, :, None], sin)

    def _joined(
        self, keys: Keys, values: Values, plan: Plan, rotation: tuple[Tensor, Tensor] | None
    ) -> tuple[Columns, ValueColumns]:
        """The columns of a chunk: the sinks, a copy of them for each query, the ring, the chunk."""
        assert self.keys is not None and self.values is not None
        sinks, length = self.retention.num_sink_tokens, plan.tokens.length
        first = self._with_new_sinks(keys, values, plan)
        copies = [part.repeat(1, 1, length, 1) for part in first]
        if rotation is not None and sinks:
            assert self.rotary is not None and self.sinks is not None
            where = self.rotary.coordinates
            copies[0][..., where] = self._rotated(rotation).flatten(2, 3).to(self.dtype)
            first[0][..., where] = self.sinks.to(self.dtype)
        joined = [
            torch.cat([one, copy, self._ring(buffer), new], dim=2)
            for one, copy, buffer, new in zip(
                first, copies, (self.keys, self.values), (keys, values), strict=True
            )
        ]
        return joined[0], joined[1]

    def _ring(self, buffer: Keys) -> Columns:
        """The ring's rows, zeros where it is not filled yet."""
        ring = buffer[:, :, self.retention.num_sink_tokens :]
        missing = self.retention.window_length - ring.shape[2]
        return ring if missing == 0 else torch.nn.functional.pad(ring, (0, 0, 0, missing))

    def _with_new_sinks(
        self, keys: Keys, values: Values, plan: Plan
    ) -> tuple[Columns, ValueColumns]:
        """The sink rows, including those of this call."""
        assert self.keys is not None and self.values is not None
        rows, numbers, slots = plan.stored
        new = slots < self.retention.num_sink_tokens
        rows, numbers, slots = rows[new], numbers[new], slots[new]
        out = []
        for buffer, given in ((self.keys, keys), (self.values, values)):
            part = buffer[:, :, : self.retention.num_sink_tokens].clone()
            part[rows, :, slots] = given[rows, :, numbers]
            out.append(part)
        return out[0], out[1]

    def rebase(self, back: Int[Tensor, " batch"]) -> None:
        """Rotate each row's keys back by that many positions; distances do not change."""
        if self.rotary is not None and self.is_initialized:
            assert self.keys is not None
            self.keys.copy_(self.rotary.rotate(self.keys, -back[:, None, None]))

    def select(self, rows: Int[Tensor, " chosen"]) -> None:
        """Keep these rows of the batch, in this order; rows may be repeated."""
        for name in ("keys", "values", "sinks", "quarters"):
            old = getattr(self, name)
            if old is not None:
                setattr(self, name, old.index_select(0, rows.to(old.device)))

    def copy(self) -> "SinkLayer":
        """A copy with its own buffers."""
        other = SinkLayer(self.retention, self.rotary, self.is_sliding)
        if self.is_initialized:
            assert self.keys is not None and self.values is not None
            other.lazy_initialization(self.keys, self.values)
            for name in ("keys", "values", "sinks", "quarters"):
                value = getattr(self, name)
                setattr(other, name, None if value is None else value.clone())
        return other

    def reset(self) -> None:
        """Forget everything; the next call creates new buffers."""
        self.keys = self.values = self.sinks = self.quarters = None
        self.is_initialized = False

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Not available here: the cache knows the call."""
        raise InputError("ask the SinkCache, not its layer, for mask sizes")

    def get_seq_length(self) -> int:
        """Number of rows in the buffer; the cache counts tokens."""
        return 0 if self.keys is None else self.keys.shape[2]

    def get_max_length(self) -> int:
        """Maximum number of keys in the layer."""
        return self.retention.capacity

    get_max_cache_shape = get_max_length
