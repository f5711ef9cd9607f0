"""`RegisterNeurons`: what a few neurons write on patches goes to one added token, no training."""

import warnings
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sinkwise.errors import InputError
from sinkwise.mitigations.base import Hooks, Mitigation, Part
from sinkwise.mitigations.prepended_tokens import lengthen, one_tower, width
from sinkwise.nn.registers import RegisterTokens

_DOWN = ("mlp.fc2", "mlp.down_proj", "mlp.weights_out", "mlp.c_proj", "output.dense")
_SCALE = ("ls2.gamma", "layer_scale2.lambda1", "ls_2.gamma")


@dataclass(frozen=True)
class RegisterNeurons(Mitigation):
    """a_reg,n = the largest of a_1,n ... a_patches,n (by size, with its sign), then a_j,n = 0.

    For each of these neurons n of a block's MLP, and for each image apart, the activation that is
    the largest of all patches is given to one added token, and the patches get none: the outlier
    norms are made there instead. Class tokens and a model's own registers keep their activations.
    The token starts as zeros, joins and hides like those of `Registers`, and is never trained.
    Without neurons nothing is put in, and a warning says why.

    `find_register_neurons` makes it. Raises InputError, on application, for a block or neuron that
    the model does not have.

    Reference: Jiang et al., 2025, arXiv 2506.08010.
    """

    neurons: tuple[tuple[int, int], ...]
    """(block, neuron of its MLP's inner layer) of each."""
    prefix: int
    """The model's own class tokens and registers, which come before its patches."""
    evidence: str = field(default="given by hand", compare=False)
    """What was found, in words."""

    name: ClassVar[str] = "register_neurons"

    def __post_init__(self) -> None:
        if self.prefix < 0:
            raise InputError(f"prefix={self.prefix} must not be negative")

    def apply(self, model: nn.Module, generator: torch.Generator, parts: list[Part]) -> None:
        if not self.neurons:
            warnings.warn(f"no register neurons, nothing was put in: {self.evidence}", stacklevel=5)
            return
        layers = down_projections(model)
        for block, neuron in self.neurons:
            if not 0 <= block < len(layers) or not 0 <= neuron < layers[block].in_features:
                sizes = sorted({layer.in_features for layer in layers})
                raise InputError(
                    f"neuron {(block, neuron)} is not there: {type(model).__name__} has "
                    f"{len(layers)} blocks with {', '.join(map(str, sizes))} neurons each"
                )
        lengthen(model, NeuronRegister(width(model), self), parts)
        for block in sorted({block for block, _ in self.neurons}):
            move = _Move([n for b, n in self.neurons if b == block], self.prefix)
            parts.append(Hooks([layers[block].register_forward_pre_hook(move)]))


class NeuronRegister(RegisterTokens):
    """The added token: zeros, not trained."""

    def __init__(self, dim: int, what: RegisterNeurons) -> None:
        super().__init__(1, dim, generator=torch.Generator())
        nn.init.zeros_(self.tokens)
        self.tokens.requires_grad_(False)
        self._what = what

    def extra_repr(self) -> str:
        """What the weights do not tell: a scan's checksum is made of this line too."""
        return f"neurons={self._what.neurons}, prefix={self._what.prefix}"


class _Move:
    """Before an MLP's second linear map: activations go from the patches to token 0."""

    def __init__(self, neurons: list[int], prefix: int) -> None:
        self._neurons, self._prefix = neurons, prefix

    def __call__(self, module: nn.Module, args: tuple) -> tuple:
        return (moved_to_first(args[0], self._neurons, 1 + self._prefix), *args[1:])


def moved_to_first(
    activations: Float[Tensor, "batch token neuron"], neurons: list[int], start: int
) -> Float[Tensor, "batch token neuron"]:
    """Each neuron's largest activation from token `start` on, by size, at token 0 of its own image,
    and 0 where it came from.
    """
    there = activations[:, start:, neurons]
    largest = there.gather(1, there.abs().argmax(1, keepdim=True))
    result = activations.clone()
    result[:, start:, neurons] = 0
    result[:, 0, neurons] = largest[:, 0]
    return result


def down_projections(model: nn.Module) -> list[nn.Linear]:
    """The second linear map of each block's MLP, whose inputs are its neurons. Raises InputError
    for models without one that is known here.
    """
    found = []
    for block in one_tower(model):
        layer = _first(block.module, _DOWN)
        if not isinstance(layer, nn.Linear):
            raise InputError(
                f"no neurons are known in {block.name!r} ({type(block.module).__name__}): its MLP "
                f"has none of {', '.join(_DOWN)}"
            )
        found.append(layer)
    return found


def written(block: nn.Module, layer: nn.Linear) -> Float[Tensor, "dim neuron"]:
    """What each neuron adds to the residual stream for an activation of 1, LayerScale included."""
    scale = _first(block, _SCALE)
    weight = layer.weight.detach().float()
    return weight * scale.detach().float()[:, None] if isinstance(scale, Tensor) else weight


def _first(block: nn.Module, paths: tuple[str, ...]) -> object:
    """What the first of these attribute paths that exists leads to, or None."""
    for path in paths:
        found: object = block
        for part in path.split("."):
            found = getattr(found, part, None)
        if found is not None:
            return found
    return None
