"""Capture: a callback for each attention call of any model, which then runs on as if unseen."""

import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sinkwise import kernels, provenance
from sinkwise.attention.mask import bias_tile
from sinkwise.attention.reference import attention
from sinkwise.errors import CaptureError
from sinkwise.hosts.blocks import Block, LayerIndex, clean, find_blocks
from sinkwise.records import OPEN, AttentionMask, AttentionRecord, AttentionSite

OnRecord = Callable[[AttentionRecord], None]
OnBlock = Callable[[Block, Tensor, Tensor, bool], None]

CHECKED_ROWS = 8
"""Queries at each end of the sequence that the self-check recomputes."""


@contextmanager
def capture(
    model: nn.Module,
    on_record: OnRecord,
    *,
    on_block: OnBlock | None = None,
    sites: dict[str, AttentionSite] | None = None,
    check: bool = True,
) -> Iterator[None]:
    """While the block runs, call `on_record` once for each attention call of `model`.

    It sees `F.scaled_dot_product_attention`, `F.multi_head_attention_forward` (its fast path is
    avoided) and any softmax between two products, by a torch function mode: nothing is patched.
    Records are only valid during the callback; nothing is kept. `on_block` is called after each
    block with (block, input, output, whether the output comes straight from a norm). `sites`
    (`hosts.attention_sites(model)`) fills `record.site`.

    With `check`, the first record of each module is recomputed: a record whose fields do not give
    the model's own output (1e-4 relative to its largest entry in float32, 2e-2 in half precision)
    raises CaptureError, and so does leaving the context when no attention was seen.
    On leaving, also after an exception, the model has the hooks, parameters and outputs it had.
    """
    blocks = find_blocks(model)
    mode = _CaptureMode(model, on_record, blocks, sites or {}, check)
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
        if _is_compiled(model):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(mode)
        yield
    if mode.forwards == 0:
        raise CaptureError("the model was not called inside `with capture(...)`")
    if mode.records == 0:
        raise CaptureError(
            f"no softmax attention was seen in {type(model).__name__}: {_why(model)}"
        )


def _is_compiled(model: nn.Module) -> bool:
    return any(
        hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        for module in model.modules()
    )


def _why(model: nn.Module) -> str:
    """The likely cause of an empty capture, and the cure."""
    known = ("eager", "sdpa", None)
    for module in model.modules():
        config = getattr(module, "config", None)
        kernel = getattr(config, "_attn_implementation", None)
        if kernel not in known:
            return (
                f"it runs attn_implementation={kernel!r}, a kernel that cannot be seen; "
                "call model.set_attn_implementation('sdpa') first"
            )
        if isinstance(module, torch.jit.ScriptModule):
            return "it is scripted; capture the original module"
    return "it has none, or uses a kernel (flash-attn, xformers) or a handwritten softmax"


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
        self._names = {id(module): clean(name) for name, module in model.named_modules()}
        self._modules = {id(module): module for module in model.modules()}
        self._index = LayerIndex(blocks)
        self._check = check
        self._checked: set[str] = set()
        self._calls: dict[str, int] = {}
        self._tags = provenance.Tags()
        self._inputs: list[tuple[Block, Tensor | None]] = []
        self._normed: weakref.ref | None = None
        self.forwards = 0
        self.records = 0

    def start(self, module: nn.Module, args: tuple) -> None:
        """A new forward pass: calls are counted from 0 again."""
        self.forwards += 1
        self._calls.clear()
        self._inputs.clear()
        self._tags.clear()

    def enter_block(self, block: Block, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Remember a block's input, the residual stream."""
        tensors = [t for t in (*args, *kwargs.values()) if _is_stream(t)]
        self._inputs.append((block, tensors[0] if tensors else None))

    def leave_block(
        self, block: Block, on_block: OnBlock | None, module: nn.Module, args: tuple, out: Any
    ) -> None:
        """Hand a block's input and output on, and forget them."""
        before = None
        while self._inputs:
            entered, before = self._inputs.pop()
            if entered is block:
                break
        after = next((t for t in _flat(out) if _is_stream(t)), None)
        if on_block is not None and before is not None and after is not None:
            normed = self._normed is not None and self._normed() is after
            with torch.no_grad():
                on_block(block, before, after, normed)

    def forget(self) -> None:
        """Let go of every tensor."""
        self._tags.clear()
        self._inputs.clear()
        self._normed = None

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is F.multi_head_attention_forward:
            with self:
                return _unwrapped_mha()(*args, **kwargs)
        if func is F.scaled_dot_product_attention and not _in_backward():
            call = kernels.bind(*args, **kwargs)
            out, lse = kernels.run(func, call)
            self._emit_sdpa(call, out, lse)
            return out
        consumed = self._consumed(name, args, kwargs)
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor):
            return result
        if consumed is not None:
            weights, value, tag = consumed
            self._emit_eager(weights, value, tag, result, name, args)
        elif name in ("layer_norm", "rms_norm"):
            self._normed = weakref.ref(result)
        else:
            self._tag(name, args, kwargs, result)
        return result

    def _consumed(
        self, name: str, args: tuple, kwargs: dict
    ) -> tuple[Tensor, Tensor, provenance.Weights] | None:
        """The weights and values of a product whose left operand is an attention map."""
        if name == "einsum":
            parts: tuple[Any, ...] = args[1:] if len(args) != 2 else tuple(args[1])
            if len(parts) == 2 and isinstance(self._tags[parts[0]], provenance.Weights):
                operands = provenance.einsum(args)
                tag = self._tags[parts[0]]
                if operands is not None and isinstance(tag, provenance.Weights):
                    return operands[0], operands[1], tag
            return None
        operands3 = provenance.product(name, args, kwargs)
        if operands3 is None:
            return None
        tag = self._tags[operands3[0]]
        if not isinstance(tag, provenance.Weights) or _in_backward():
            return None
        return operands3[0], operands3[1], tag

    def _tag(self, name: str, args: tuple, kwargs: dict, result: Tensor) -> None:
        """Tag the result of a product or of an operation on tagged tensors."""
        if not result.is_floating_point():
            return
        if name == "einsum":
            operands = provenance.einsum(args)
            # Scores are followed only where the result already is [.. query key].
            if operands is not None and operands[2](result).shape == result.shape:
                left, right, order = operands
                if order(result).stride() == result.stride():
                    self._tags[result] = provenance.Scores(left, right.mT)
            return
        operands3 = provenance.product(name, args, kwargs)
        if operands3 is not None:
            left, right, state = operands3
            self._tags[result] = provenance.Scores(left, right.mT, **state)
            return
        tag = provenance.follow(self._tags, name, args, kwargs, result)
        if tag is not None:
            self._tags[result] = tag

    def _owner(self) -> tuple[str, nn.Module | None]:
        """The innermost module of the model whose method is running: a walk up the frames."""
        frame: types.FrameType | None = sys._getframe(2)
        while frame is not None:
            if "self" in frame.f_code.co_varnames[:1]:
                owner = frame.f_locals.get("self")
                if id(owner) in self._names:
                    return self._names[id(owner)], self._modules[id(owner)]
            frame = frame.f_back
        return "", None

    def _emit_sdpa(self, call: kernels.Call, out: Tensor, lse: Tensor | None) -> None:
        name, _ = self._owner()
        four = kernels.four_dimensional
        mask = AttentionMask(causal=call.is_causal)
        if call.attn_mask is not None:
            given = four(call.attn_mask)
            mask = (
                AttentionMask(allowed=given)
                if given.dtype == torch.bool
                else AttentionMask(additive=given)
            )
        self._emit(
            name,
            dropped=call.dropout_p > 0,
            q=four(call.query),
            k=four(call.key),
            v=four(call.value),
            out=four(out),
            scale=call.scale,
            mask=mask,
            lse=None if lse is None else lse.reshape(four(call.query).shape[:3]),
        )

    def _emit_eager(
        self,
        weights: Tensor,
        value: Tensor,
        tag: provenance.Weights,
        out: Tensor,
        name: str,
        args: tuple,
    ) -> None:
        scores = tag.scores
        path, owner = self._owner()
        if name == "einsum":
            operands = provenance.einsum(args)
            assert operands is not None
            out = operands[2](out)
        shape = kernels.batch_and_heads(weights, tag.lead, owner)
        four = functools.partial(kernels.with_lead, lead=shape)
        q, k, v = four(scores.q), four(scores.k), four(value)
        bias = scores.bias
        if bias is not None:
            bias = kernels.bias_with_lead(bias, shape)
        sink = scores.sink
        if sink is not None:
            sink = sink.expand(*tag.lead, weights.shape[-2]).reshape(*shape, -1)
        self._emit(
            path,
            q=q,
            k=k,
            v=v,
            out=four(out),
            scale=scores.scale,
            softcap=scores.softcap,
            mask=OPEN if bias is None else AttentionMask(additive=bias),
            sink_logit=sink,
            weights=four(weights),
            faithful=scores.faithful,
        )

    def _emit(self, name: str, dropped: bool = False, **fields: Any) -> None:
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        block = self._index.block(name)
        residual = None
        if self._inputs and self._inputs[-1][0] is block:
            residual = self._inputs[-1][1]
            queries, batch = fields["q"].shape[2], fields["q"].shape[0]
            if residual is not None and residual.shape[:2] != (batch, queries):
                residual = None
        record = AttentionRecord(
            layer=self._index.layer(name, call),
            name=name,
            call=call,
            residual=residual,
            site=self._sites.get(name),
            **fields,
        )
        self.records += 1
        if self._check and not dropped and name not in self._checked:
            self._checked.add(name)
            _verify(record)
        self._on_record(record)


@torch.no_grad()
def _verify(record: AttentionRecord) -> None:
    """Recompute some rows of the output from the record's own fields."""
    queries, keys = record.q.shape[2], record.k.shape[2]
    half = record.out.dtype.itemsize == 2
    for rows in (range(min(CHECKED_ROWS, queries)), range(max(0, queries - CHECKED_ROWS), queries)):
        part = slice(rows.start, rows.stop)
        dtype = torch.float64 if record.q.dtype == torch.float64 else torch.float32
        bias = bias_tile(record.mask, rows, range(keys), dtype, record.q.device)
        mask = OPEN if bias is None else AttentionMask(additive=bias)
        sink = record.sink_logit
        if sink is not None and sink.shape[2] > 1:
            sink = sink[:, :, part]
        own = record.out[:, :, part].to(dtype)
        again = attention(
            record.q[:, :, part],
            record.k,
            record.v,
            scale=record.scale,
            softcap=record.softcap,
            mask=mask,
            sink_logit=sink,
        ).out
        visible = torch.isfinite(own).all(dim=-1, keepdim=True)
        if bias is not None:  # a query that sees nothing: kernels differ, and nobody reads it
            visible &= (bias > -torch.inf).any(dim=-1, keepdim=True)
        error = ((own - again).abs() * visible).nan_to_num(0.0, posinf=0.0).max()
        limit = (2e-2 if half else 1e-4) * max(
            1.0, float((own * visible).nan_to_num(0.0).abs().max())
        )
        if error <= limit and bool(torch.isfinite(error)):
            continue
        if record.weights is not None:
            record.faithful = False  # the map is the model's own; its origin is not fully known
            return
        raise CaptureError(
            f"{record.name or 'the model'} (layer {record.layer}): the output recomputed from the "
            f"captured record differs from the model's by {float(error):.3g} (allowed {limit:.3g})"
        )


def _in_backward() -> bool:
    """True while autograd runs: checkpointed layers are computed again then."""
    return torch._C._current_graph_task_id() != -1


def _is_stream(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() >= 3 and value.is_floating_point()


def _flat(out: Any) -> Iterator[Any]:
    if isinstance(out, tuple | list):
        for part in out:
            yield from _flat(part)
    elif isinstance(out, dict):
        for part in out.values():
            yield from _flat(part)
    else:
        yield out


@functools.cache
def _unwrapped_mha() -> Callable:
    """`F.multi_head_attention_forward` whose body runs inside a torch function mode.

    The original hands itself to the mode and so hides the attention within. This is the same code
    object with its own globals, in which no argument asks for that.
    """
    original = F.multi_head_attention_forward
    scope = {**original.__globals__, "has_torch_function": lambda _: False}
    copy = types.FunctionType(
        original.__code__, scope, original.__name__, original.__defaults__, original.__closure__
    )
    copy.__kwdefaults__ = original.__kwdefaults__
    return copy
