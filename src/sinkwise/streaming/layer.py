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
"""Slots that a buffer has at first; it doubles until it holds the whole cache."""


class SinkLayer(CacheLayerMixin):
    """Slots 0 … S − 1 hold the sinks, the other W are a ring.

    Keys lie as the model rotated them. Only the sinks are turned, each time from the float32
    original, so that their distance to the query is the distance in the cache.
    """

    def __init__(self, retention: Retention, rotary: Rotary | None, sliding: bool) -> None:
        super().__init__()
        self.retention = retention
        self.rotary = rotary
        self.is_sliding = sliding
        self.sinks: Keys | None = None
        """Rotated coordinates of the sink keys, as they arrived, in at least float32."""
        self.quarters: Keys | None = None
        """The same, every pair turned by 90°."""

    def __repr__(self) -> str:
        kind = "sliding" if self.is_sliding else "sinks"
        return f"SinkLayer({kind}, {self.retention})"

    def lazy_initialization(self, key_states: Keys, value_states: Values | None = None) -> None:
        """Buffers like these keys and values."""
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
        """Store a call's keys and values by its plan; returns all that its queries attend to."""
        plan, turn = args
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
        self._room(min(max(plan.tokens.after), self.retention.capacity))
        self._remember(key_states, plan)
        if plan.mode == "chunk":
            out = self._joined(key_states, value_states, plan, turn)
            self._write(key_states, value_states, plan)
            return out
        self._write(key_states, value_states, plan)
        if plan.mode == "step":
            self._turn_sinks(turn)
        if plan.columns == self.keys.shape[2]:
            return self.keys, self.values
        return self.keys.narrow(2, 0, plan.columns), self.values.narrow(2, 0, plan.columns)

    def step(
        self, key_states: Keys, value_states: Values, slot: int, columns: int
    ) -> tuple[Columns, ValueColumns]:
        """The same for one token of every row, all at the same token, the sinks stored before and
        turned already: it goes to that slot, and so many columns are attended to.
        """
        assert self.keys is not None and self.values is not None
        if key_states.requires_grad or value_states.requires_grad:
            key_states, value_states = key_states.detach(), value_states.detach()
        if columns > self.keys.shape[2]:
            self._room(columns)
        self.keys.narrow(2, slot, 1).copy_(key_states)
        self.values.narrow(2, slot, 1).copy_(value_states)
        if columns == self.keys.shape[2]:
            return self.keys, self.values
        return self.keys.narrow(2, 0, columns), self.values.narrow(2, 0, columns)

    @property
    def sink_rows(self) -> Keys:
        """Where the buffer has the sinks."""
        assert self.keys is not None
        return self.keys.narrow(2, 0, self.retention.num_sink_tokens)

    def _room(self, rows: int) -> None:
        """Make the buffers hold at least so many rows."""
        assert self.keys is not None and self.values is not None
        have = self.keys.shape[2]
        if rows > have:
            size = min(self.retention.capacity, max(rows, 2 * have, FIRST_ROWS))
            for name in ("keys", "values"):
                old = getattr(self, name)
                new = old.new_zeros(*old.shape[:2], size, old.shape[3])
                new[:, :, :have] = old
                setattr(self, name, new)

    def _remember(self, keys: Keys, plan: Plan) -> None:
        """Keep the originals of the sinks among these keys."""
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
        """Put the keys and values that stay into their slots."""
        assert self.keys is not None and self.values is not None
        seen, length = plan.tokens.seen[0], plan.tokens.length
        for buffer, new in ((self.keys, keys), (self.values, values)):
            if plan.tokens.uniform and plan.mode == "append":
                buffer.narrow(2, seen, length).copy_(new)
            else:
                rows, numbers, slots = plan.stored
                buffer[rows, :, slots] = new[rows, :, numbers]

    def _turn_sinks(self, turn: tuple[Tensor, Tensor] | None) -> None:
        """Write the sinks as the one query of a step sees them, each row at a token of its own."""
        if turn is not None and self.retention.num_sink_tokens:
            assert self.rotary is not None
            turned = self._turned(turn)[:, :, 0]
            self.sink_rows[..., self.rotary.coordinates].copy_(turned)

    def _turned(
        self, turn: tuple[Tensor, Tensor]
    ) -> Float[Tensor, "batch kv_head query key rotated"]:
        """The sinks' rotated coordinates, turned for each query."""
        assert self.sinks is not None and self.quarters is not None
        cos, sin = (part[..., None, :] for part in turn)
        return torch.addcmul(self.sinks[:, :, None] * cos, self.quarters[:, :, None], sin)

    def _joined(
        self, keys: Keys, values: Values, plan: Plan, turn: tuple[Tensor, Tensor] | None
    ) -> tuple[Columns, ValueColumns]:
        """The columns of a chunk: sinks as stored, a copy for each query, the ring, the chunk."""
        assert self.keys is not None and self.values is not None
        sinks, length = self.retention.num_sink_tokens, plan.tokens.length
        first = self._with_new_sinks(keys, values, plan)
        copies = [part.repeat(1, 1, length, 1) for part in first]
        if turn is not None and sinks:
            assert self.rotary is not None and self.sinks is not None
            where = self.rotary.coordinates
            copies[0][..., where] = self._turned(turn).flatten(2, 3).to(self.dtype)
            first[0][..., where] = self.sinks.to(self.dtype)
        joined = [
            torch.cat([one, copy, self._ring(buffer), new], dim=2)
            for one, copy, buffer, new in zip(
                first, copies, (self.keys, self.values), (keys, values), strict=True
            )
        ]
        return joined[0], joined[1]

    def _ring(self, buffer: Keys) -> Columns:
        """The ring's rows, zeros where it has none yet."""
        ring = buffer[:, :, self.retention.num_sink_tokens :]
        missing = self.retention.window_length - ring.shape[2]
        return ring if missing == 0 else torch.nn.functional.pad(ring, (0, 0, 0, missing))

    def _with_new_sinks(
        self, keys: Keys, values: Values, plan: Plan
    ) -> tuple[Columns, ValueColumns]:
        """The sink rows, those that this call brings included."""
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
        """Turn every key back by so many positions a row: distances stay, angles get small."""
        if self.rotary is not None and self.is_initialized:
            assert self.keys is not None
            self.keys.copy_(self.rotary.turn(self.keys, -back[:, None, None]))

    def select(self, rows: Int[Tensor, " chosen"]) -> None:
        """Only these rows of the batch, in this order, repeated where they are."""
        for name in ("keys", "values", "sinks", "quarters"):
            old = getattr(self, name)
            if old is not None:
                setattr(self, name, old.index_select(0, rows.to(old.device)))

    def copy(self) -> "SinkLayer":
        """The same layer with buffers of its own."""
        other = SinkLayer(self.retention, self.rotary, self.is_sliding)
        if self.is_initialized:
            assert self.keys is not None and self.values is not None
            other.lazy_initialization(self.keys, self.values)
            for name in ("keys", "values", "sinks", "quarters"):
                value = getattr(self, name)
                setattr(other, name, None if value is None else value.clone())
        return other

    def reset(self) -> None:
        """Forget everything; buffers are made anew at the next call."""
        self.keys = self.values = self.sinks = self.quarters = None
        self.is_initialized = False

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Told by the cache, which knows the call."""
        raise InputError("ask the SinkCache, not its layer, for mask sizes")

    def get_seq_length(self) -> int:
        """Rows in the buffer; the cache counts tokens."""
        return 0 if self.keys is None else self.keys.shape[2]

    def get_max_length(self) -> int:
        """Keys that the layer holds at most."""
        return self.retention.capacity

    get_max_cache_shape = get_max_length
