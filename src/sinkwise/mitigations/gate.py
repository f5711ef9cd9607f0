"""`Gate`: a sigmoid on what each head computed, put into every attention layer of a model."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sinkwise.errors import InputError
from sinkwise.mitigations.base import Child, Hooks, Mitigation, Part
from sinkwise.mitigations.forward_override import watch
from sinkwise.mitigations.gate_mha import GatedMultihead
from sinkwise.mitigations.targets import Layer, attention_layers
from sinkwise.nn.gate import GateKind, OutputGate

GateInit = Literal["identity", "paper"]

CHILD = "output_gate"
"""The name of the gate in the attention module."""


@dataclass(frozen=True)
class Gate(Mitigation):
    """out = W_O(concat_h(A V) * gain * sigmoid(W_g x + b)), in every attention layer.

    x is the layer's input: the residual stream after the block's norm. `init="identity"`: W_g = 0,
    b = 0 and gain 2, so every factor is 2 * 1/2 = 1, exactly, in every dtype, and the outputs are
    the same bits until the gate is trained. That is no saturated gate: the factor, in (0, 2), has
    its steepest slope there, 1/2. A doubled W_O makes it a gate without a gain, again exactly.
    `init="paper"`: W_g ~ N(0, 1e-6), b = 2 and gain 1; every factor starts near 0.88, so outputs
    change at once: it is for models that are trained with the gate from the start.

    In cross attention x are the queries' tokens. `nn.MultiheadAttention` multiplies by W_O inside
    of torch and is gated there, in training and inference; where inference took torch's fused path
    (also that of `nn.TransformerEncoderLayer`), it is left, and outputs stay within rounding: 1e-6.
    Attention outside of the blocks whose layout is unknown (timm's pooling) has no gate.

    Raises InputError for another kind or init, and, on application, where a layer of a block has an
    output gate already, or something else than W_O between its heads and its output.

    Reference: Qiu et al., 2025, arXiv 2505.06708 (position G1).
    """

    kind: GateKind = "elementwise"
    """`elementwise`: a factor for each channel; `headwise`: one for each head."""
    init: GateInit = "identity"
    """`identity`: a pretrained model's outputs stay as they are; `paper`: as in the paper."""

    name: ClassVar[str] = "gate"

    def __post_init__(self) -> None:
        if self.kind not in get_args(GateKind):
            raise InputError(f"kind={self.kind!r} is none of {', '.join(get_args(GateKind))}")
        if self.init not in get_args(GateInit):
            raise InputError(f"init={self.init!r} is none of {', '.join(get_args(GateInit))}")

    def apply(self, model: nn.Module, generator: torch.Generator, parts: list[Part]) -> None:
        for place in _places(model):
            weight = place.projection.weight
            gate = HeadGate(
                place.heads * place.value_dim,
                place.heads,
                in_dim=place.in_dim,
                kind=self.kind,
                init=self.init,
                generator=generator,
            ).to(device=weight.device, dtype=weight.dtype)
            parts.append(Child(place.attention, CHILD, gate))
            if isinstance(place.attention, nn.MultiheadAttention):
                watch(GatedMultihead(place.path, place.attention, gate), parts)
            else:
                parts.append(Hooks(_GateHooks(place, gate).register()))


class HeadGate(OutputGate):
    """The gate with its gain: heads * gain * sigmoid(W_g x + b)."""

    def __init__(self, *args: Any, init: GateInit, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gain = 1.0
        if init == "identity":
            self.gain = 2.0
            nn.init.zeros_(self.proj.weight)
            nn.init.zeros_(self.proj.bias)

    def factor(self, x: Float[Tensor, "*batch in_dim"]) -> Float[Tensor, "*batch factor"]:
        """gain * sigmoid(W_g x + b), each in (0, gain)."""
        return self.gain * super().factor(x)

    def extra_repr(self) -> str:
        """What the weights do not tell: a scan's checksum is made of this line too."""
        return f"kind={self.kind!r}, gain={self.gain}"


class _Place(NamedTuple):
    """An attention layer and the linear map that is its W_O."""

    path: str
    attention: nn.Module
    projection: Any
    heads: int
    value_dim: int
    in_dim: int


class _GateHooks:
    """Takes the attention layer's input when it is called, and gates what W_O is given."""

    def __init__(self, place: _Place, gate: OutputGate) -> None:
        self._place, self._gate = place, gate
        self._x: Tensor | None = None

    def register(self) -> list[Any]:
        attention, projection = self._place.attention, self._place.projection
        handles = [
            attention.register_forward_pre_hook(self._enter, with_kwargs=True),
            projection.register_forward_pre_hook(self._project),
        ]
        # BERT's W_O lies beside its attention and runs after it.
        if any(module is projection for module in attention.modules()):
            handles.append(attention.register_forward_hook(self._leave))
        return handles

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        streams = (t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))
        self._x = next((t for t in streams if t.dim() >= 3 and t.is_floating_point()), None)

    def _project(self, module: nn.Module, args: tuple) -> tuple:
        heads, x = args[0], self._x
        self._x = None
        if x is None or x.shape != (*heads.shape[:-1], self._place.in_dim):
            raise InputError(
                f"the gate of {self._place.path!r} needs that layer's input for W_O's "
                f"{list(heads.shape)}, and found {None if x is None else list(x.shape)}"
            )
        return (self._gate(heads, x), *args[1:])

    def _leave(self, module: nn.Module, args: tuple, out: Any) -> None:
        if self._x is not None:
            self._x = None
            raise InputError(f"{self._place.path!r} ran without calling its W_O: no gate was used")


def _places(model: nn.Module) -> list[_Place]:
    """The attention layers of a model, all of them. Raises InputError where one takes no gate."""
    holders = {
        weight.untyped_storage().data_ptr(): module
        for module in model.modules()
        if isinstance(weight := getattr(module, "weight", None), nn.Parameter)
    }
    return [_place(layer, holders) for layer in attention_layers(model, CHILD, "no gate fits")]


def _place(layer: Layer, holders: dict[int, nn.Module]) -> _Place:
    path, attention, site = layer
    projection = None if site.o is None else holders.get(site.o.untyped_storage().data_ptr())
    if site.q is None or site.o is None or projection is None:
        raise InputError(f"no gate fits {path!r}: its output projection is no plain linear map")
    heads, head_dim, in_dim = site.q.shape
    rows = getattr(getattr(attention, "q_proj", None), "out_features", heads * head_dim)
    if rows == 2 * heads * head_dim:
        raise InputError(f"no gate fits {path!r}: it has an output gate of its own, inside q_proj")
    return _Place(path, attention, projection, heads, site.o.shape[2], in_dim)
