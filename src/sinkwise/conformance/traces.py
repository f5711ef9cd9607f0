"""Checks that a capture leaves no trace in the model, also after an exception."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from sinkwise.capturing.capture import capture
from sinkwise.conformance.comparing import require, same_bits
from sinkwise.conformance.errors import Skip
from sinkwise.conformance.observation import Observation, outputs_of
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


def check_no_trace(observed: Observation) -> None:
    """A capture changes no hook, parameter or attribute, no state of torch, and no output bit."""
    _leaves_no_trace(observed, lambda record: None)


def check_no_trace_after_a_failing_callback(observed: Observation) -> None:
    """The same if the callback raises during a forward pass."""

    def stop(record: AttentionRecord) -> None:
        raise _Stop

    require(
        _leaves_no_trace(observed, stop), "an exception in the callback did not reach the caller"
    )


def check_no_trace_after_a_failing_model(observed: Observation) -> None:
    """The same if a submodule of the model raises: the one that makes the last record."""
    modules = {clean(name): module for name, module in observed.model.named_modules()}
    last = modules.get(observed.records[-1].name) if observed.records else None
    if last is None:
        raise Skip("no record belongs to a module of the model")
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

    arrived = _leaves_no_trace(observed, lambda record: None, broken())
    if not reached:
        raise Skip(f"{observed.records[-1].name} is not called as a module")
    require(arrived, "an exception in the model did not reach the caller")


def _leaves_no_trace(
    observed: Observation,
    on_record: Callable[[AttentionRecord], None],
    during: AbstractContextManager | None = None,
) -> bool:
    """Compare the state before and after a capture; True if an exception was raised in it."""
    model, stopped = observed.model, False
    plain = outputs_of(model, observed.inputs)
    before = state_of(model)
    with during or nullcontext():
        try:
            with capture(model, on_record):
                outputs_of(model, observed.inputs)
        except _Stop:
            stopped = True
    after = state_of(model)
    changed = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    require(not changed, f"a capture changed {', '.join(changed[:5])}")
    require(
        same_bits(plain, outputs_of(model, observed.inputs)), "output bits differ after a capture"
    )
    return stopped


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything that a capture must not change, by name."""
    state: dict[str, Any] = {}
    for name, module in model.named_modules():
        name = name or "the model"
        hooks = [list(getattr(module, kind)) for kind in _HOOKS]
        compiled = getattr(module, "_compiled_call_impl", None)
        state[f"hooks of {name}"] = hooks
        state[f"attributes of {name}"] = (type(module), sorted(module.__dict__), id(compiled))
        state[f"training mode of {name}"] = module.training
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        grad = None if tensor.grad is None else (tensor.grad.data_ptr(), tensor.grad._version)
        state[f"tensor {name}"] = (tensor.data_ptr(), tensor._version, tensor.requires_grad, grad)
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
