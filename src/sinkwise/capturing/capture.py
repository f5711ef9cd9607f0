"""Capture: a callback for each attention call of any model, which runs on unchanged."""

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from torch import nn

from sinkwise.capturing import refusals
from sinkwise.capturing.block_runs import OnBlock
from sinkwise.capturing.mode import CaptureMode, OnRecord
from sinkwise.core.records import AttentionSite
from sinkwise.errors import CaptureError
from sinkwise.hosts.blocks import find_blocks


@dataclass(eq=False)
class Coverage:
    """What a capture recorded, complete once its context was left."""

    records: int = 0
    silent: tuple[str, ...] = ()
    """Blocks that ran without any softmax attention that could be captured: linear attention,
    state-space layers, or a kernel that bypasses torch functions."""


@contextmanager
def capture(
    model: nn.Module,
    on_record: OnRecord,
    *,
    on_block: OnBlock | None = None,
    sites: dict[str, AttentionSite] | None = None,
    check: bool = True,
) -> Iterator[Coverage]:
    """Within the `with` block, call `on_record` once for each attention call of `model`.

    Captured are `F.scaled_dot_product_attention`, `F.multi_head_attention_forward` (whose fast path
    is avoided), FlexAttention (run uncompiled), `sinkwise.sink_attention`, and any softmax between
    two matrix products. Nothing is patched: a torch function mode intercepts the calls. Records are
    valid during the callback only; nothing is kept. Calls made in other threads are not seen.

    `on_block` is called after each block with (block, layer, input, output, whether the output is
    that of a norm). `sites` (`hosts.attention_sites(model)`) fills `record.site`. The `Coverage`
    names, afterwards, the blocks that ran without any softmax attention.

    With `check`, the first record of each call of each module is recomputed from its own fields,
    which must give the model's own output within 1e-4 of its largest entry in float32, and 2e-2 in
    half precision. A sink logit is recorded where it is one more column of the scores or scales
    the output by sigmoid(lse - sink).

    On leaving, also after an exception, the model has the hooks, parameters and outputs it had.

    Raises CaptureError where a record does not reproduce the output; where no attention was
    captured; for a model that is set to flash-attn (`set_attn_implementation("sdpa")` resolves it);
    and where a module has a sink logit, or passes one to its kernel, that the kernel drops (SDPA
    under gpt-oss).
    """
    refusals.refuse(model)
    blocks = find_blocks(model)
    mode = CaptureMode(model, blocks, on_record, on_block, sites or {}, check)
    coverage = Coverage()
    with ExitStack() as stack:
        stack.callback(mode.forget)
        handles = [model.register_forward_pre_hook(mode.start)]
        for block in blocks:
            enter = functools.partial(mode.enter_block, block)
            leave = functools.partial(mode.leave_block, block)
            handles.append(block.module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(block.module.register_forward_hook(leave, always_call=True))
        for handle in handles:
            stack.callback(handle.remove)
        stack.enter_context(mode.uncompiled)
        stack.enter_context(mode)
        yield coverage
        mode.flush()
    coverage.records, coverage.silent = mode.records, mode.silent()
    if mode.forwards == 0 and mode.records == 0:
        raise CaptureError("the model was not called inside `with capture(...)`")
    if mode.records == 0:
        raise CaptureError(
            f"no softmax attention was seen in {type(model).__name__}: {refusals.why(model)}"
        )
