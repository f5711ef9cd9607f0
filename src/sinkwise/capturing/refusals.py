"""Why the attention of a model cannot be seen, and the cure."""

import re
import sys
from typing import Any

import torch
from torch import nn

from sinkwise.errors import CaptureError
from sinkwise.hosts.implementation import attention_implementations

_UNSEEN = re.compile(r"(paged\|)?flash_")
"""Kernels known to be unseen; others may yet call torch's own."""


class Uncompiled:
    """While entered, nothing that is compiled runs compiled.

    Nothing can be compiled before torch's compiler is loaded, which takes seconds; it is therefore
    held as soon as it is there, which may be in the middle of a forward pass.
    """

    def __init__(self) -> None:
        self._stance: Any = None

    def __enter__(self) -> None:
        self.hold()

    def __exit__(self, *error: object) -> None:
        if self._stance is not None:
            self._stance.__exit__(*error)
            self._stance = None

    def hold(self) -> None:
        """Make torch.compile run eagerly, once its module has been loaded."""
        if self._stance is not None:
            return
        compiler = sys.modules.get("torch._dynamo")
        if compiler is not None and not getattr(compiler.__spec__, "_initializing", False):
            self._stance = torch.compiler.set_stance("force_eager")
            self._stance.__enter__()


def refuse(model: nn.Module) -> None:
    """Raise CaptureError where a configuration names a kernel that is known to be unseen."""
    kernel = _unusual_kernel(model)
    if kernel is not None and _UNSEEN.match(kernel):
        raise CaptureError(f"{type(model).__name__} cannot be captured: {_advice(kernel)}")


def why(model: nn.Module) -> str:
    """The likely cause of an empty capture, and the cure."""
    kernel = _unusual_kernel(model)
    if kernel is not None:
        return _advice(kernel)
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        return "it is scripted; capture the original module"
    return "it has none, or uses a kernel (flash-attn, xformers) or a handwritten softmax"


def _unusual_kernel(model: nn.Module) -> str | None:
    """The first kernel named by a configuration of the model that is none of torch's own."""
    own = ("eager", "sdpa", "flex_attention")
    return next((kernel for kernel in attention_implementations(model) if kernel not in own), None)


def _advice(kernel: str) -> str:
    return (
        f"it runs attn_implementation={kernel!r}, a kernel that cannot be seen; "
        "call model.set_attn_implementation('sdpa') first, or 'eager' where it has no 'sdpa'"
    )
