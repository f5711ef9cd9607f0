"""The torch function mode of a capture: from a function that attends to its record."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sinkwise.capturing import self_check, sink_arguments
from sinkwise.capturing.block_runs import BlockRuns, OnBlock
from sinkwise.capturing.uncompiled import Uncompiled
from sinkwise.core.records import AttentionRecord, AttentionSite
from sinkwise.hosts.blocks import Block, LayerIndex, clean
from sinkwise.interception import flex, matmul, mha, op_names, sdpa, shapes
from sinkwise.interception import sink_attention as sink_adapter
from sinkwise.interception.callers import callers
from sinkwise.interception.eager import EagerAttention
from sinkwise.interception.intercepted import Adapter, Description, Intercepted, Rescaled
from sinkwise.interception.lse_trace import LseTrace
from sinkwise.interception.mask_reader import MaskReader
from sinkwise.nn.sink_logit import sink_attention

OnRecord = Callable[[AttentionRecord], None]

ADAPTERS: dict[object, Adapter] = {
    F.scaled_dot_product_attention: sdpa.intercept,
    flex.OPERATOR: flex.intercept,
    sink_attention: sink_adapter.intercept,
}
"""Functions that are an attention call by themselves; `EagerAttention` runs every other one."""


class CaptureMode(TorchFunctionMode):
    """Intercepts every torch function that the model calls while the mode is on."""

    def __init__(
        self,
        model: nn.Module,
        blocks: list[Block],
        on_record: OnRecord,
        on_block: OnBlock | None,
        sites: dict[str, AttentionSite],
        check: bool,
    ) -> None:
        super().__init__()
        self._on_record = on_record
        self._sites = sites
        self._check = check
        # Walked once: a scan opens a capture for each batch.
        self._modules = {id(m): (clean(name), m) for name, m in model.named_modules()}
        parameters = (p for _, m in self._modules.values() for p in m._parameters.values())
        self._index = LayerIndex(blocks)
        self._blocks = BlockRuns(self._index, on_block)
        self._lse = LseTrace()
        self._eager = EagerAttention(
            self._lse, {matmul.storage(p) for p in parameters if p is not None} - {0}
        )
        self._masks = MaskReader()
        self.uncompiled = Uncompiled()
        self._calls: dict[str, int] = {}
        self._sinks: dict[str, sink_arguments.Sink | None] = {}
        self._checked: set[tuple[str, int]] = set()
        self._unfaithful: set[str] = set()
        self.forwards = 0
        self.records = 0

    def start(self, module: nn.Module, args: tuple) -> None:
        """A new forward pass: calls are counted from 0 again."""
        self.flush()
        self.forwards += 1
        self._calls.clear()
        self._blocks.start()
        self.forget()

    def enter_block(self, block: Block, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """A block is about to run."""
        if not _in_backward():
            self._blocks.enter(block, args, kwargs)

    def leave_block(self, block: Block, module: nn.Module, args: tuple, out: Any) -> None:
        """A block has run."""
        if not _in_backward():
            self.flush()
            self._blocks.leave(block, out)

    def flush(self) -> None:
        """Emit the call that waits for the use of its output, if there is one."""
        with torch._C.DisableTorchFunction():
            self._lse.flush()

    def forget(self) -> None:
        """Forget every tensor."""
        self._eager.clear()
        self._lse.clear()
        self._masks.clear()
        self._blocks.clear()

    def silent(self) -> tuple[str, ...]:
        """The blocks that ran and called no softmax attention."""
        return self._blocks.silent()

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.uncompiled.switch_off()
        if mha.is_mha(func):
            return mha.run_under(self, args, kwargs)
        if _in_backward():
            return func(*args, **kwargs)
        adapter = ADAPTERS.get(func)
        if adapter is not None:
            result, description = adapter(func, args, kwargs)
            self._intercepted(description)
            return result
        name = getattr(func, "__name__", "")
        result, completed = self._eager.intercept(func, name, args, kwargs)
        if completed is not None:
            self._intercepted(completed)
        elif name in op_names.NORM:
            self._blocks.normed(result)
        return result

    def _intercepted(self, description: Description) -> None:
        """Emit a call's record, now or when its output is used."""
        self._lse.flush()
        name, owner = self._owner()
        call = description(owner)
        if call is None:
            return
        if name not in self._sinks and call.fields.get("sink_logit") is None:
            self._sinks[name] = sink_arguments.find(owner, call.fields["q"].shape[1])
        emit = functools.partial(self._emit, name, call)
        if call.deferral is None:
            emit(None)
        else:
            self._lse.defer(call.deferral, emit)

    def _owner(self) -> tuple[str, nn.Module | None]:
        """The path and module whose method is running: the innermost of the model on the stack."""
        for frame in callers():
            if "self" in frame.f_code.co_varnames[:1]:
                found = self._modules.get(id(frame.f_locals.get("self")))
                if found is not None:
                    return found
        return "", None

    def _emit(self, name: str, call: Intercepted, rescaled: Rescaled | None) -> None:
        fields = dict(call.fields)
        if rescaled is not None and call.deferral is not None:
            fields.update(call.deferral.rescaled(rescaled))
        number = self._calls.get(name, 0)
        self._calls[name] = number + 1
        layer = self._index.layer(name, number)
        fields["k"], fields["v"] = shapes.ungrouped(fields["k"], fields["v"])
        fields["mask"] = self._masks.read(
            fields["mask"], call.mask_tensor, fields["q"], fields["k"]
        )
        residual = self._blocks.attend(name, fields["q"])
        sink = self._sinks.get(name)
        if sink is not None and fields.get("sink_logit") is None:
            raise sink_arguments.error(sink, name, layer)
        record = AttentionRecord(
            layer=layer,
            name=name,
            call=number,
            residual=residual,
            site=self._sites.get(name),
            **fields,
        )
        self.records += 1
        record.faithful &= name not in self._unfaithful
        if self._check and not call.has_dropout:
            self._verify_once(record)
        self._on_record(record)

    def _verify_once(self, record: AttentionRecord) -> None:
        """Recompute the first record of each call of each module."""
        if (record.name, record.call) in self._checked:
            return
        self._checked.add((record.name, record.call))
        self_check.verify(record)
        if not record.faithful:
            self._unfaithful.add(record.name)


def _in_backward() -> bool:
    """True while autograd runs: checkpointed layers are computed again then."""
    return torch._C._current_graph_task_id() != -1
