"""What a sink cache holds: the buffers of its layers and the counters of its rows."""

from dataclasses import dataclass, field

from jaxtyping import Bool, Int
from torch import Tensor

from sinkwise.core.retention import Retention
from sinkwise.streaming.call import CacheCall
from sinkwise.streaming.layer import SinkLayer
from sinkwise.streaming.plan import chunk_sizes
from sinkwise.streaming.positions.scheme import Positions
from sinkwise.streaming.rotation import SinkRotation
from sinkwise.streaming.rows import Rows


@dataclass(eq=False)
class CacheState:
    """A cache without its model: a call begins, every layer stores its keys, the call ends."""

    retention: Retention
    """What the layers with sinks keep."""
    positions: Positions
    layers: list[SinkLayer]
    rows: Rows = field(init=False)
    """The counters of each row."""
    _rotations: list[SinkRotation] | None = field(default=None, init=False)
    """Made at the first step with full buffers, and again after the rows have changed."""

    def __post_init__(self) -> None:
        kept = {layer.retention for layer in self.layers}
        self.rows = Rows(self.retention)
        self._others = frozenset(kept - {self.retention})
        self._least = min(retention.capacity for retention in kept)

    def split(self, length: int) -> list[int]:
        """Lengths of the calls that a call is split into: first one that evicts nothing, then
        chunks short enough for one copy of the sinks per query.
        """
        retentions = (self.retention, *self._others)
        return chunk_sizes(length, self.rows.most, retentions, self.positions.learned)

    def begin(self, batch: int, length: int, real: Bool[Tensor, "batch query"] | None) -> CacheCall:
        """Plan a call, and re-rotate the sinks if one rotation fits all rows."""
        tokens = self.rows.tokens(batch, length, real)
        back = self.rows.rebase()
        if back is not None:
            for layer in self.layers:
                layer.rebase(back)
        call = CacheCall(tokens, self.retention, self.rows.base, self._others)
        if call.steps is not None and tokens.seen[0] >= self.retention.capacity:
            if self._rotations is None:
                self._rotations = SinkRotation.of(self.layers)
            shift = tokens.seen[0] - self.rows.base[0] - (self.retention.capacity - 1)
            for rotation in self._rotations:
                rotation.write(shift)
        return call

    def store(
        self, call: CacheCall, key_states: Tensor, value_states: Tensor, layer_idx: int
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values; return all that its queries attend to."""
        layer = self.layers[layer_idx]
        if call.steps is not None:
            return layer.step(key_states, value_states, *call.steps[layer.retention])
        plan = call.plan(layer.retention)
        rotation = None
        if plan.mode != "append" and layer.retention.num_sink_tokens:
            rotation = call.rotation(layer.rotary, key_states)
        keys, values = layer.update(key_states, value_states, plan, rotation)
        bias = self.positions.bias
        if bias is not None and (blocks := bias.blocks(plan)) > 1:
            return keys.repeat(1, 1, blocks, 1), values.repeat(1, 1, blocks, 1)
        return keys, values

    def end(self, call: CacheCall) -> None:
        """Count the tokens of a call that all layers have stored."""
        self.rows.count(call.tokens, croppable=self._least)

    def reset(self) -> None:
        """Forget all tokens."""
        for layer in self.layers:
            layer.reset()
        self.rows, self._rotations = Rows(self.retention), None

    def select(self, indices: Int[Tensor, " chosen"]) -> None:
        """Keep these rows, in this order; a row may be chosen twice."""
        if self.rows.seen is None:
            return
        chosen, self._rotations = indices.to("cpu"), None
        for layer in self.layers:
            layer.select(chosen)
        self.rows.select(chosen)

    def copy(self) -> "CacheState":
        """A copy with its own buffers and counters."""
        layers = [layer.copy() for layer in self.layers]
        other = CacheState(self.retention, self.positions, layers)
        other.rows = self.rows.copy()
        return other
