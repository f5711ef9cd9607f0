"""The runs of a model's blocks: their inputs and outputs, which are the residual stream."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sinkwise.hosts.blocks import Block, LayerIndex
from sinkwise.hosts.hidden import whole
from sinkwise.interception.nested import is_residual_stream, leaves

OnBlock = Callable[[Block, int, Tensor, Tensor, bool], None]
"""(block, layer, input, output, whether the output is that of a norm)."""


class BlockRuns:
    """Which block is running, on which residual stream, and which blocks called attention."""

    def __init__(self, index: LayerIndex, on_block: OnBlock | None) -> None:
        self._index = index
        self._on_block = on_block
        self._running: list[tuple[Block, Tensor | None]] = []
        self._runs: dict[str, int] = {}
        self._normed: weakref.ref | None = None
        self._entered: dict[str, Block] = {}
        self._attended: set[str] = set()

    def start(self) -> None:
        """A new forward pass: runs are counted from 0 again."""
        self._running.clear()
        self._runs.clear()

    def enter(self, block: Block, args: tuple, kwargs: dict) -> None:
        """Remember a block's input."""
        stream = next((t for t in leaves((args, kwargs)) if is_residual_stream(t)), None)
        self._running.append((block, stream))
        self._entered[block.name] = block

    def leave(self, block: Block, out: Any) -> None:
        """Pass a block's input and output to the callback, and forget them."""
        before = None
        while self._running:
            entered, before = self._running.pop()
            if entered is block:
                break
        run = self._runs.get(block.name, 0)
        self._runs[block.name] = run + 1
        layer = self._index.layer(block.name, run)
        after = next((t for t in leaves(out) if is_residual_stream(t)), None)
        if self._on_block is not None and before is not None and after is not None:
            normed = self._normed is not None and self._normed() is after
            with torch.no_grad():
                self._on_block(block, layer, whole(before), whole(after), normed)

    def normed(self, result: Tensor) -> None:
        """A norm returned this tensor."""
        self._normed = weakref.ref(result)

    def attend(self, path: str, q: Tensor) -> Tensor | None:
        """The module at `path` attends: its block's input, if that has one row per query."""
        block = self._index.block(path)
        if block is None:
            return None
        self._attended.add(block.name)
        if not self._running or self._running[-1][0] is not block:
            return None
        stream = self._running[-1][1]
        residual = None if stream is None else whole(stream)
        # Hyper-connections carry several residual streams per token, windows are cut from a grid.
        fits = residual is not None and residual[..., 0].shape == (q.shape[0], q.shape[2])
        return residual if fits else None

    def silent(self) -> tuple[str, ...]:
        """The blocks that ran and called no softmax attention."""
        return tuple(name for name in self._entered if name not in self._attended)

    def clear(self) -> None:
        """Forget every tensor."""
        self._running.clear()
        self._normed = None
