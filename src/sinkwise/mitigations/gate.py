"""`Gate`: a sigmoid gate on the heads' outputs, in every attention layer of a model."""

import threading
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sinkwise.errors import InputError
from sinkwise.mitigations.base import AddedHooks, AddedModule, Insertion, Mitigation
from sinkwise.mitigations.forward_override import override_forward
from sinkwise.mitigations.gate_mha import GatedMultihead
from sinkwise.mitigations.targets import Layer, attention_layers
from sinkwise.nn.gate import GateKind, OutputGate

GateInit = Literal["identity", "paper"]

SUBMODULE = "output_gate"
"""The name of the gate in the attention module."""


@dataclass(frozen=True)
class Gate(Mitigation):
    r"""A sigmoid gate on the heads' outputs, in every attention layer.

    $$
    \mathrm{out} = W_O\left(
    \operatorname{concat}_h(A_h V_h) \odot \mathrm{gain} \cdot \sigma(W_g x + b)\right)
    $$

    $x$ is the layer's input: the residual stream after the block's norm. In cross attention these
    are the tokens of the queries.

    `init="identity"` starts with $W_g = 0$, $b = 0$ and gain 2, so that every factor is exactly
    $2 \cdot \tfrac12 = 1$ in every dtype, and outputs stay bit for bit the same until the gate is
    trained. The gate is not saturated: the slope of its factor, in $(0, 2)$, is largest there, 1/2.
    With $W_O$ doubled, it is exactly a gate without a gain. `init="paper"` starts with
    $W_g \sim N(0, 10^{-6})$, $b = 2$ and gain 1: every factor is near 0.88, and outputs change at
    once. It is for models that are trained with the gate from scratch.

    `nn.MultiheadAttention` multiplies by $W_O$ inside torch and is gated there, in training and
    inference. If inference took torch's fused path (also that of `nn.TransformerEncoderLayer`), it
    no longer does, and outputs agree within rounding, 1e-6. Attention outside the blocks with an
    unknown layout (timm's pooling) gets no gate.

    Raises InputError for an unknown kind or init. On application, raises InputError if a layer has
    an output gate already, or something other than $W_O$ between its heads and its output.

    Reference: Qiu et al., 2025, arXiv 2505.06708 (position G1).
    """

    kind: GateKind = "elementwise"
    """`elementwise`: one factor per channel; `headwise`: one per head."""
    init: GateInit = "identity"
    """`identity`: a pretrained model's outputs do not change; `paper`: as in the paper."""

    name: ClassVar[str] = "gate"

    def __post_init__(self) -> None:
        if self.kind not in get_args(GateKind):
            raise InputError(f"kind={self.kind!r} is none of {', '.join(get_args(GateKind))}")
        if self.init not in get_args(GateInit):
            raise InputError(f"init={self.init!r} is none of {', '.join(get_args(GateInit))}")

    def apply(
        self, model: nn.Module, generator: torch.Generator, insertions: list[Insertion]
    ) -> None:
        for layer in _gated_layers(model):
            weight = layer.projection.weight
            gate = HeadGate(
                layer.heads * layer.value_dim,
                layer.heads,
                in_dim=layer.in_dim,
                kind=self.kind,
                init=self.init,
                generator=generator,
                device=generator.device,  # also if torch's default device is another
            ).to(device=weight.device, dtype=weight.dtype)
            insertions.append(AddedModule(layer.attention, SUBMODULE, gate))
            if isinstance(layer.attention, nn.MultiheadAttention):
                override_forward(GatedMultihead(layer.path, layer.attention, gate), insertions)
            else:
                insertions.append(AddedHooks(_GateHooks(layer, gate).register()))


class HeadGate(OutputGate):
    r"""The gate with its gain: $\mathrm{heads} \odot \mathrm{gain} \cdot \sigma(W_g x + b)$."""

    def __init__(self, *args: Any, init: GateInit, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gain = 1.0
        if init == "identity":
            self.gain = 2.0
            nn.init.zeros_(self.proj.weight)
            nn.init.zeros_(self.proj.bias)

    def factor(self, x: Float[Tensor, "*batch in_dim"]) -> Float[Tensor, "*batch factor"]:
        r"""$\mathrm{gain} \cdot \sigma(W_g x + b)$, each in $(0, \mathrm{gain})$."""
        return self.gain * super().factor(x)

    def extra_repr(self) -> str:
        """What the weights do not determine; a scan's fingerprint includes this line."""
        return f"kind={self.kind!r}, gain={self.gain}"


class _GatedLayer(NamedTuple):
    """An attention layer, and the linear layer that is its W_O."""

    path: str
    attention: nn.Module
    projection: Any
    heads: int
    value_dim: int
    in_dim: int


class _GateHooks:
    """Keeps the input of an attention layer until its W_O is called, and gates the input of W_O.

    Each thread has its own input: several may call the model at once.
    """

    def __init__(self, layer: _GatedLayer, gate: OutputGate) -> None:
        self._layer, self._gate = layer, gate
        self._inputs: dict[int, Tensor | None] = {}
        """The layer's input, by thread."""

    def register(self) -> list[Any]:
        attention, projection = self._layer.attention, self._layer.projection
        handles = [
            attention.register_forward_pre_hook(self._enter, with_kwargs=True),
            projection.register_forward_pre_hook(self._project),
        ]
        # BERT's W_O is not inside its attention module and runs after it.
        if any(module is projection for module in attention.modules()):
            handles.append(attention.register_forward_hook(self._leave))
        return handles

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        tensors = (t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))
        x = next((t for t in tensors if t.dim() >= 3 and t.is_floating_point()), None)
        self._inputs[_thread()] = x

    def _project(self, module: nn.Module, args: tuple) -> tuple:
        heads, x = args[0], self._inputs.pop(_thread(), None)
        if x is None or x.shape != (*heads.shape[:-1], self._layer.in_dim):
            raise InputError(
                f"the gate of {self._layer.path!r} needs that layer's input, of shape "
                f"{[*heads.shape[:-1], self._layer.in_dim]}, and found "
                f"{None if x is None else list(x.shape)}; call the layer's output projection only "
                "from its forward"
            )
        return (self._gate(heads, x), *args[1:])

    def _leave(self, module: nn.Module, args: tuple, out: Any) -> None:
        if self._inputs.pop(_thread(), None) is not None:
            raise InputError(
                f"{self._layer.path!r} ran without calling its output projection, so its gate had "
                "no effect; undo() removes the gate"
            )


def _thread() -> int:
    # torch.compile traces a single thread, and does not know get_ident.
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


def _gated_layers(model: nn.Module) -> list[_GatedLayer]:
    """All attention layers of a model. Raises InputError if one does not support a gate."""
    linears = {
        weight.untyped_storage().data_ptr(): module
        for module in model.modules()
        if isinstance(weight := getattr(module, "weight", None), nn.Parameter)
    }
    return [
        _gated_layer(layer, linears) for layer in attention_layers(model, SUBMODULE, "cannot gate")
    ]


def _gated_layer(layer: Layer, linears: dict[int, nn.Module]) -> _GatedLayer:
    path, attention, site = layer
    projection = None if site.o is None else linears.get(site.o.untyped_storage().data_ptr())
    if site.q is None or site.o is None or projection is None:
        raise InputError(f"cannot gate {path!r}: its output projection is not a plain linear layer")
    heads, head_dim, in_dim = site.q.shape
    rows = getattr(getattr(attention, "q_proj", None), "out_features", heads * head_dim)
    if rows == 2 * heads * head_dim:
        raise InputError(f"cannot gate {path!r}: it has an output gate of its own, inside q_proj")
    return _GatedLayer(path, attention, projection, heads, site.o.shape[2], in_dim)
