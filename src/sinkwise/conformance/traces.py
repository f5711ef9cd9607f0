"""Checks that a capture leaves no trace, whatever happens while it is on."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from sinkwise.capturing.capture import capture
from sinkwise.conformance.sample import Sample, Skip, demand, run, same_bits
from sinkwise.core.records import AttentionRecord
from sinkwise.hosts.blocks import clean

_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)  # fmt: skip


class _Stop(Exception):
    """Raised on purpose."""


def check_no_trace(sample: Sample) -> None:
    """Hooks, parameters, attributes, torch's own state and output bits outlive a capture."""
    _leaves_no_trace(sample, lambda record: None)


def check_no_trace_after_a_failing_callback(sample: Sample) -> None:
    """The same when the callback raises in the middle of a forward pass."""

    def stop(record: AttentionRecord) -> None:
        raise _Stop

    demand(_leaves_no_trace(sample, stop), "an exception of the callback did not arrive")


def check_no_trace_after_a_failing_model(sample: Sample) -> None:
    """The same when a submodule of the model raises: the one that makes the last record."""
    modules = {clean(name): module for name, module in sample.model.named_modules()}
    last = modules.get(sample.records[-1].name) if sample.records else None
    if last is None:
        raise Skip("no module of the model made a record")
    reached = False

    @contextmanager
    def broken() -> Any:
        def stop(module: nn.Module, given: tuple) -> None:
            nonlocal reached
            reached = True
            raise _Stop

        handle = last.register_forward_pre_hook(stop)
        try:
            yield
        finally:
            handle.remove()

    arrived = _leaves_no_trace(sample, lambda record: None, broken())
    if not reached:
        raise Skip(f"{sample.records[-1].name} runs without being called")
    demand(arrived, "an exception of the model did not arrive")


def _leaves_no_trace(
    sample: Sample,
    on_record: Callable[[AttentionRecord], None],
    during: AbstractContextManager | None = None,
) -> bool:
    """Compare before and after a capture; True if an exception was raised in it."""
    model, stopped = sample.model, False
    plain = run(model, sample.inputs)
    before = state_of(model)
    with during or nullcontext():
        try:
            with capture(model, on_record):
                run(model, sample.inputs)
        except _Stop:
            stopped = True
    after = state_of(model)
    changed = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    demand(not changed, f"after a capture, other than before: {', '.join(changed[:5])}")
    demand(same_bits(plain, run(model, sample.inputs)), "the output's bits differ after a capture")
    return stopped


def state_of(model: nn.Module) -> dict[str, Any]:
    """What a capture may not change, by name."""
    state: dict[str, Any] = {}
    for name, module in model.named_modules():
        name = name or "the model"
        hooks = [list(getattr(module, kind)) for kind in _HOOKS]
        compiled = getattr(module, "_compiled_call_impl", None)
        state[f"hooks of {name}"] = hooks
        state[f"attributes of {name}"] = (type(module), sorted(module.__dict__), id(compiled))
        state[f"training mode of {name}"] = module.training
    for name, held in [*model.named_parameters(), *model.named_buffers()]:
        grad = None if held.grad is None else (held.grad.data_ptr(), held.grad._version)
        state[f"tensor {name}"] = (held.data_ptr(), held._version, held.requires_grad, grad)
    state["state dict"] = list(model.state_dict())
    state["torch function modes"] = torch._C._len_torch_function_stack()
    state["torch dispatch modes"] = torch._C._len_torch_dispatch_stack()
    state["fast path of nn.MultiheadAttention"] = torch.backends.mha.get_fastpath_enabled()
    state["grad mode"] = torch.is_grad_enabled()
    state["random state"] = torch.get_rng_state().tolist()
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    state["torch.compile's stance"] = None if dynamo is None else repr(dynamo._stance)
    state["attention functions"] = tuple(
        id(getattr(torch.nn.functional, name))
        for name in ("scaled_dot_product_attention", "multi_head_attention_forward", "softmax")
    )
    return state
