"""`F.multi_head_attention_forward`, run so that a torch function mode sees the attention in it."""

import functools
import types
from collections.abc import Callable
from typing import Any

from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


def is_mha(func: object) -> bool:
    """Whether this is the function that `nn.MultiheadAttention` calls."""
    return func is F.multi_head_attention_forward


def run_under(mode: TorchFunctionMode, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run its body under `mode` again: the calls inside are then intercepted one by one."""
    with mode:
        return unwrapped_mha()(*args, **kwargs)


@functools.cache
def unwrapped_mha() -> Callable:
    """`F.multi_head_attention_forward` with its body visible to torch function modes.

    The original hands itself to the mode and so conceals the attention inside. This is the same
    code object with its own globals, in which no argument requests that.
    """
    original = F.multi_head_attention_forward
    scope = {**original.__globals__, "has_torch_function": lambda _: False}
    copy = types.FunctionType(
        original.__code__, scope, original.__name__, original.__defaults__, original.__closure__
    )
    copy.__kwdefaults__ = original.__kwdefaults__
    return copy
