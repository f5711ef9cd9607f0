"""Models whose attention cannot be captured: why, and what to do about it."""

import re

import torch
from torch import nn

from sinkwise.errors import CaptureError
from sinkwise.hosts.implementation import attention_implementations

_NOT_CAPTURED = re.compile(r"(paged\|)?flash_")
"""Kernels known to bypass torch functions; others may still call torch's own attention."""


def refuse(model: nn.Module) -> None:
    """Raise CaptureError where a configuration names a kernel that cannot be captured."""
    kernel = _foreign_kernel(model)
    if kernel is not None and _NOT_CAPTURED.match(kernel):
        raise CaptureError(f"{type(model).__name__} cannot be captured: {_advice(kernel)}")


def why(model: nn.Module) -> str:
    """The likely cause of an empty capture, and the remedy."""
    kernel = _foreign_kernel(model)
    if kernel is not None:
        return _advice(kernel)
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        return "it is scripted; capture the original module"
    return "it has none, or uses a kernel (flash-attn, xformers) or a handwritten softmax"


def _foreign_kernel(model: nn.Module) -> str | None:
    """The first kernel named by a configuration of the model that is not one of torch's own."""
    own = ("eager", "sdpa", "flex_attention")
    return next((kernel for kernel in attention_implementations(model) if kernel not in own), None)


def _advice(kernel: str) -> str:
    return (
        f"it uses attn_implementation={kernel!r}, a kernel that cannot be captured; call "
        "model.set_attn_implementation('sdpa') first, or 'eager' where it does not support 'sdpa'"
    )
