"""Capture: a callback for each attention call of any model, which then runs on as if unseen."""

import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sinkwise.capturing import refusals, self_check, sink_arguments
from sinkwise.core.records import OPEN, AttentionMask, AttentionRecord, AttentionSite
from sinkwise.errors import CaptureError
from sinkwise.hosts.blocks import Block, LayerIndex, clean, find_blocks
from sinkwise.hosts.hidden import whole
from sinkwise.interception import flex, mask_reader, matmul, score_trace, sdpa
from sinkwise.interception.lse_trace import Behind, Scaled
from sinkwise.interception.nested import is_stream, leaves
from sinkwise.nn.sink_logit import sink_attention

OnRecord = Callable[[AttentionRecord], None]
OnBlock = Callable[[Block, int, Tensor, Tensor, bool], None]


@dataclass(eq=False)
class Coverage:
    """What a capture saw, complete once its context was left."""

    records: int = 0
    silent: tuple[str, ...] = ()
    """Blocks that ran without any softmax attention: linear attention, state-space layers, or a
    kernel that cannot be seen."""


@contextmanager
def capture(
    model: nn.Module,
    on_record: OnRecord,
    *,
    on_block: OnBlock | None = None,
    sites: dict[str, AttentionSite] | None = None,
    check: bool = True,
) -> Iterator[Coverage]:
    """While the block runs, call `on_record` once for each attention call of `model`.

    It sees `F.scaled_dot_product_attention`, `F.multi_head_attention_forward` (its fast path is
    avoided), `sinkwise.sink_attention` and any softmax between two products, by a torch function
    mode: nothing is patched. Records are only valid during the callback; nothing is kept.
    `on_block` is called after each block with (block, layer, input, output, whether the output
    comes straight from a norm). `sites` (`hosts.attention_sites(model)`) fills `record.site`.

    With `check`, each module's calls are recomputed once: a record whose fields do not give the
    model's own output (1e-4 relative to its largest entry in float32, 2e-2 in half precision)
    raises CaptureError, and so does leaving the context when no attention was seen. A model set to
    flash-attn is refused at once: `set_attn_implementation("sdpa")` cures it. FlexAttention runs
    uncompiled. Sink logits are one more column of the scores, or scale the output by
    sigmoid(lse - sink); a module that has one, or hands one to a kernel that drops it (SDPA under
    gpt-oss), raises. Calls made in other threads are not seen.
    The `Coverage` names, afterwards, the blocks that ran without any softmax attention.
    On leaving, also after an exception, the model has the hooks, parameters and outputs it had.
    """
    refusals.refuse(model)
    blocks = find_blocks(model)
    mode = _CaptureMode(model, on_record, blocks, sites or {}, check)
    coverage = Coverage()
    with ExitStack() as stack:
        stack.callback(mode.forget)
        handles = [model.register_forward_pre_hook(mode.start)]
        for block in blocks:
            enter = functools.partial(mode.enter_block, block)
            leave = functools.partial(mode.leave_block, block, on_block)
            handles.append(block.module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(block.module.register_forward_hook(leave, always_call=True))
        for handle in handles:
            stack.callback(handle.remove)
        stack.enter_context(mode.uncompiled)
        stack.enter_context(mode)
        yield coverage
        mode.flush()
    coverage.records, coverage.silent = mode.records, mode.silent()
    if mode.records == 0 and mode.forwards == 0:
        raise CaptureError("the model was not called inside `with capture(...)`")
    if mode.records == 0:
        raise CaptureError(
            f"no softmax attention was seen in {type(model).__name__}: {refusals.why(model)}"
        )


class _CaptureMode(TorchFunctionMode):
    """Sees every torch function that the model calls while the mode is on."""

    def __init__(
        self,
        model: nn.Module,
        on_record: OnRecord,
        blocks: list[Block],
        sites: dict[str, AttentionSite],
        check: bool,
    ) -> None:
        super().__init__()
        self._on_record = on_record
        self._sites = sites
        # Walked once: a scan opens a capture for each batch.
        self._owners = {id(m): (clean(name), m) for name, m in model.named_modules()}
        parameters = (p for _, m in self._owners.values() for p in m._parameters.values())
        self._weights = {matmul.storage(p) for p in parameters if p is not None} - {0}
        self._index = LayerIndex(blocks)
        self._check = check
        self._checked: set[tuple[str, int]] = set()
        self._doubtful: set[str] = set()
        self._calls: dict[str, int] = {}
        self._runs: dict[str, int] = {}
        self._tags = score_trace.Tags()
        self._behind = Behind()
        self._sinks: dict[str, sink_arguments.Sink | None] = {}
        self._masks = mask_reader.Reader()
        self.uncompiled = refusals.Uncompiled()
        self._inputs: list[tuple[Block, Tensor | None]] = []
        self._normed: weakref.ref | None = None
        self._ran: dict[str, Block] = {}
        self._heard: set[str] = set()
        self.forwards = 0
        self.records = 0

    def start(self, module: nn.Module, args: tuple) -> None:
        """A new forward pass: calls are counted from 0 again."""
        self.flush()
        self.forwards += 1
        self._calls.clear()
        self._runs.clear()
        self._inputs.clear()
        self._tags.clear()
        self._behind.clear()
        self._masks.clear()

    def enter_block(self, block: Block, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Remember a block's input, the residual stream."""
        if _in_backward():
            return
        tensors = [t for t in leaves((args, kwargs)) if is_stream(t)]
        self._inputs.append((block, tensors[0] if tensors else None))
        self._ran[block.name] = block

    def leave_block(
        self, block: Block, on_block: OnBlock | None, module: nn.Module, args: tuple, out: Any
    ) -> None:
        """Hand a block's input and output on, and forget them."""
        if _in_backward():
            return
        self.flush()
        before = None
        while self._inputs:
            entered, before = self._inputs.pop()
            if entered is block:
                break
        layer = self._index.layer(block.name, self._runs.get(block.name, 0))
        self._runs[block.name] = self._runs.get(block.name, 0) + 1
        after = next((t for t in leaves(out) if is_stream(t)), None)
        if on_block is not None and before is not None and after is not None:
            normed = self._normed is not None and self._normed() is after
            with torch.no_grad():
                on_block(block, layer, whole(before), whole(after), normed)

    def flush(self) -> None:
        """Emit a call that waits for what becomes of its output."""
        with torch._C.DisableTorchFunction():
            self._behind.flush()

    def forget(self) -> None:
        """Let go of every tensor."""
        self._tags.clear()
        self._behind.clear()
        self._masks.clear()
        self._inputs.clear()
        self._normed = None

    def silent(self) -> tuple[str, ...]:
        """The blocks that ran and called no softmax attention."""
        return tuple(name for name in self._ran if name not in self._heard)

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        self.uncompiled.hold()
        if func is F.multi_head_attention_forward:
            with self:
                return sdpa.unwrapped_mha()(*args, **kwargs)
        if _in_backward():
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            call = sdpa.bind(*args, **kwargs)
            out, lse = sdpa.run(func, call)
            self._emit_sdpa(call, out, lse)
            return out
        if func is sink_attention:
            out = func(*args, **kwargs)
            q, k, v, sink = args
            options = {key: value for key, value in kwargs.items() if key != "form"}
            self._emit_sdpa(sdpa.bind(q, k, v, **options), out, None, sink[None, :, None])
            return out
        if flex.is_flex(func):
            out, lse, *more = func(*args, **kwargs)
            self._emit_flex(args, out, lse)
            return (out, lse, *more)
        self._behind.before(name, args, kwargs)
        if name == "__setitem__":
            self._tags.doubt(args[0])
        product = matmul.product(name, args, kwargs)
        result = func(*args, **kwargs)
        self._behind.after(name, args, kwargs, result)
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        if product is not None:
            self._multiplied(product, result)
            return result
        if name in ("layer_norm", "rms_norm"):
            self._normed = weakref.ref(result)
        tag = score_trace.follow(self._tags, name, args, kwargs, result)
        if tag is not None:
            self._tags[result] = tag
        scores = score_trace.summed(self._tags, name, args, kwargs)
        if scores is not None:
            self._behind.hold(result, scores)
        return result

    def _multiplied(self, product: matmul.Product, result: Tensor) -> None:
        """A product consumes an attention map, or may be the first step towards one."""
        for side, operand in enumerate(product.operands):
            tag = self._tags[operand]
            turned = side == 1
            if isinstance(tag, score_trace.Weights) and tag.laid_out(
                product.axes[side], turned=turned
            ):
                parts = product.left, product.right, product.laid_out(result)
                if turned:  # (A v)^T = v^T A^T
                    parts = product.right.mT, product.left.mT, parts[2].mT
                self._emit_eager(tag, *parts)
                return
        if matmul.storage(product.right) in self._weights:
            return  # a linear map
        self._tags[result] = score_trace.Scores(
            product.left,
            product.right.mT,
            scale=product.alpha,
            bias=product.bias,
            order=product.place,
        )

    def _owner(self) -> tuple[str, nn.Module | None]:
        """The innermost module of the model whose method is running: a walk up the frames."""
        frame: types.FrameType | None = sys._getframe(2)
        while frame is not None:
            if "self" in frame.f_code.co_varnames[:1]:
                owner = frame.f_locals.get("self")
                if id(owner) in self._owners:
                    return self._owners[id(owner)]
            frame = frame.f_back
        return "", None

    def _look(self, name: str, owner: nn.Module | None, heads: int) -> None:
        """Look for a sink logit of a module that attends for the first time."""
        if name not in self._sinks:
            self._sinks[name] = sink_arguments.find(owner, sys._getframe(1), heads)

    def _emit_flex(self, args: tuple, out: Tensor, lse: Tensor) -> None:
        """FlexAttention: what its log-sum-exp does to the output is a part of the call."""
        self._behind.flush()
        name, owner = self._owner()
        self._look(name, owner, out.shape[1])
        fields = flex.fields(args, out, lse)

        def emit(scaled: Scaled | None) -> None:
            self._emit(name, **(fields if scaled is None else flex.sunk(fields, scaled)))

        call = object()
        self._behind.hold(lse, call, factor=flex.LSE_UNIT, strict=True)
        self._behind.wait(call, out, emit)

    def _emit_sdpa(
        self, call: sdpa.Call, out: Tensor, lse: Tensor | None, sink: Tensor | None = None
    ) -> None:
        self._behind.flush()
        name, owner = self._owner()
        four = sdpa.four_dimensional
        mask = AttentionMask(causal=call.is_causal)
        if call.attn_mask is not None:
            given = four(call.attn_mask)
            mask = (
                AttentionMask(allowed=given)
                if given.dtype == torch.bool
                else AttentionMask(additive=given)
            )
        fields: dict[str, Any] = {
            "q": four(call.query),
            "k": four(call.key),
            "v": four(call.value),
            "out": four(out),
            "mask": mask,
            "lse": None if lse is None else lse.reshape(four(call.query).shape[:3]),
        }
        fields = sdpa.unpacked(fields, owner)
        fields["sink_logit"] = sink
        self._look(name, owner, fields["q"].shape[1])
        self._emit(name, call.dropout_p > 0, given=call.attn_mask, scale=call.scale, **fields)

    def _emit_eager(
        self, tag: score_trace.Weights, weights: Tensor, value: Tensor, out: Tensor
    ) -> None:
        self._behind.flush()
        scores = tag.scores
        name, owner = self._owner()
        shape = sdpa.batch_and_heads(weights, tag.lead, owner)
        four = functools.partial(sdpa.with_lead, lead=shape)
        q, k, v = four(scores.q), four(scores.k), four(value)
        if weights.shape[-2:] != (q.shape[2], k.shape[2]) or k.shape[2] != v.shape[2]:
            return  # made of something else than these queries and keys: its block stays silent
        bias = scores.bias
        if bias is not None:
            bias = sdpa.bias_with_lead(bias, shape)
        self._look(name, owner, q.shape[1])

        def emit(scaled: Scaled | None) -> None:
            sink, share = scores.sink, None
            if scaled is not None:
                sink, share = (t.reshape(*tag.lead, -1) for t in (scaled.sink, scaled.share))
            if sink is not None:
                sink = sink.expand(*tag.lead, weights.shape[-2]).reshape(*shape, -1)
            self._emit(
                name,
                tag.dropped,
                q=q,
                k=k,
                v=v,
                out=four(out if scaled is None else scaled.out),
                scale=scores.scale,
                softcap=scores.softcap,
                mask=OPEN if bias is None else AttentionMask(additive=bias),
                sink_logit=sink,
                weights=four(weights if share is None else weights * share[..., None]),
                faithful=scores.faithful and tag.faithful,
            )

        if self._behind.knows(scores):
            self._behind.wait(scores, out, emit)
        else:
            emit(None)

    def _emit(
        self, name: str, drops: bool = False, given: Tensor | None = None, **fields: Any
    ) -> None:
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        block = self._index.block(name)
        if block is not None:
            self._heard.add(block.name)
        fields["k"], fields["v"] = sdpa.ungrouped(fields["k"], fields["v"])
        fields["mask"] = self._masks.read(fields["mask"], given, fields["q"], fields["k"])
        residual = None
        if self._inputs and self._inputs[-1][0] is block:
            before = self._inputs[-1][1]
            residual = None if before is None else whole(before)
            queries, batch = fields["q"].shape[2], fields["q"].shape[0]
            # Hyper-connections carry several streams a token, windows lie on a grid.
            if residual is not None and residual[..., 0].shape != (batch, queries):
                residual = None
        layer, sink = self._index.layer(name, call), self._sinks.get(name)
        if sink is not None and fields.get("sink_logit") is None:
            raise sink_arguments.error(sink, name, layer)
        record = AttentionRecord(
            layer=layer,
            name=name,
            call=call,
            residual=residual,
            site=self._sites.get(name),
            **fields,
        )
        self.records += 1
        record.faithful &= name not in self._doubtful
        if self._check and not drops and (name, call) not in self._checked:
            self._checked.add((name, call))
            self_check.verify(record)
            if not record.faithful:
                self._doubtful.add(name)
        self._on_record(record)


def _in_backward() -> bool:
    """True while autograd runs: checkpointed layers are computed again then."""
    return torch._C._current_graph_task_id() != -1
