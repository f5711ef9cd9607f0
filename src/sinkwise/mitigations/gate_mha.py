"""The gate of an `nn.MultiheadAttention`, which multiplies by W_O inside torch."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from sinkwise.errors import InputError
from sinkwise.mitigations.forward_override import ForwardOverride, LayerMode
from sinkwise.nn.gate import OutputGate


class GatedMultihead(ForwardOverride):
    """W_O(gate(heads, query)), with the query input as the input of the gate."""

    def __init__(self, path: str, attention: nn.MultiheadAttention, gate: OutputGate) -> None:
        super().__init__(path, attention)
        self._gate = gate

    def mode(self, args: tuple, kwargs: dict[str, Any]) -> LayerMode:
        x = args[0] if args else kwargs["query"]
        if self.attention.batch_first and x.dim() == 3:
            x = x.transpose(0, 1)  # torch multiplies by W_O with the tokens first
        out_proj: Any = self.attention.out_proj
        return _Projection(self.path, out_proj.weight, self._gate, x.flatten(0, -2))


class _Projection(LayerMode):
    """Gates the heads before they are multiplied by W_O."""

    def __init__(
        self, path: str, weight: Tensor, gate: OutputGate, x: Float[Tensor, "token dim"]
    ) -> None:
        super().__init__()
        self._path, self._weight, self._gate, self._x = path, weight, gate, x
        self._count = 0

    def intercept(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        if func is F.linear and len(args) > 1 and args[1] is self._weight:
            self._count += 1
            heads = args[0]
            if heads.shape[:-1] != self._x.shape[:-1]:
                raise InputError(
                    f"the gate of {self._path!r} needs the query input with one row per token, for "
                    f"heads {list(heads.shape)}, and found {list(self._x.shape)}"
                )
            args = (self._gate(heads, self._x), *args[1:])
        return func(*args, **kwargs)

    def finish(self) -> None:
        if self._count != 1:
            raise InputError(
                f"{self._path!r} multiplied {self._count} times by its output projection, and its "
                "gate needs exactly once, as F.multi_head_attention_forward does; undo() removes "
                "the gate"
            )
