"""`RegisterNeurons`: a few neurons act on one added token instead of on patches; no training."""

import warnings
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sinkwise.errors import InputError
from sinkwise.hosts.attributes import attribute
from sinkwise.mitigations.base import AddedHooks, Insertion, Mitigation
from sinkwise.mitigations.prepended_tokens import prepend, supported_blocks, token_width
from sinkwise.nn.registers import RegisterTokens

_DOWN = ("mlp.fc2", "mlp.down_proj", "mlp.weights_out", "mlp.c_proj", "output.dense")
_SCALE = ("ls2.gamma", "layer_scale2.lambda1", "ls_2.gamma")


@dataclass(frozen=True)
class RegisterNeurons(Mitigation):
    r"""Test-time registers: neurons that cause outlier norms act on one added token instead.

    $$
    a_{\mathrm{reg},n} \leftarrow a_{j^*,n},\quad j^* = \operatorname{argmax}_j |a_{j,n}|,\qquad
    a_{j,n} \leftarrow 0
    $$

    For each of these neurons $n$ of a block's MLP, and in each image, the activation of largest
    absolute value among the patches $j$ moves to the added token, and the patches get 0: the
    outlier norm appears there instead. Class tokens and the model's own registers keep their
    activations. The token starts at zero, is inserted as those of `Registers` are, and is never
    trained. Without neurons nothing is inserted, and a warning says why.

    `find_register_neurons` returns it. Raises InputError for a negative prefix, and, on
    application, for a block or neuron that the model does not have.

    Reference: Jiang et al., 2025, arXiv 2506.08010.
    """

    neurons: tuple[tuple[int, int], ...]
    """(block, neuron of the inner layer of its MLP) for each neuron."""
    prefix: int
    """Number of the model's own class tokens and registers, which precede the patches."""
    evidence: str = field(default="given by hand", compare=False)
    """A sentence about what was found."""

    name: ClassVar[str] = "register_neurons"

    def __post_init__(self) -> None:
        if self.prefix < 0:
            raise InputError(f"prefix={self.prefix} must be at least 0")

    def apply(
        self, model: nn.Module, generator: torch.Generator, insertions: list[Insertion]
    ) -> None:
        if not self.neurons:
            warnings.warn(
                f"no register neurons, nothing was inserted: {self.evidence}", stacklevel=5
            )
            return
        layers = down_projections(model)
        for block, neuron in self.neurons:
            if not 0 <= block < len(layers) or not 0 <= neuron < layers[block].in_features:
                sizes = sorted({layer.in_features for layer in layers})
                raise InputError(
                    f"neuron {(block, neuron)} does not exist: {type(model).__name__} has "
                    f"{len(layers)} blocks with {', '.join(map(str, sizes))} neurons each"
                )
        prepend(model, NeuronRegister(token_width(model), self), insertions)
        for block in sorted({block for block, _ in self.neurons}):
            move = _MoveActivations([n for b, n in self.neurons if b == block], self.prefix)
            insertions.append(AddedHooks([layers[block].register_forward_pre_hook(move)]))


class NeuronRegister(RegisterTokens):
    """The added token: zero, not trained."""

    def __init__(self, dim: int, mitigation: RegisterNeurons) -> None:
        super().__init__(1, dim, generator=torch.Generator(), device="cpu")
        nn.init.zeros_(self.tokens)
        self.tokens.requires_grad_(False)
        self._mitigation = mitigation

    def extra_repr(self) -> str:
        """What the weights do not determine; a scan's fingerprint includes this line."""
        return f"neurons={self._mitigation.neurons}, prefix={self._mitigation.prefix}"


class _MoveActivations:
    """A hook before an MLP's second linear layer: activations move from patches to token 0."""

    def __init__(self, neurons: list[int], prefix: int) -> None:
        self._neurons, self._prefix = neurons, prefix

    def __call__(self, module: nn.Module, args: tuple) -> tuple:
        return (move_to_first_token(args[0], self._neurons, 1 + self._prefix), *args[1:])


def move_to_first_token(
    activations: Float[Tensor, "batch token neuron"], neurons: list[int], start: int
) -> Float[Tensor, "batch token neuron"]:
    """Move the activation of largest absolute value per image and neuron to token 0.

    Tokens from `start` on take part, and get 0 for these neurons.
    """
    patches = activations[:, start:, neurons]
    largest = patches.gather(1, patches.abs().argmax(1, keepdim=True))
    result = activations.clone()
    result[:, start:, neurons] = 0
    result[:, 0, neurons] = largest[:, 0]
    return result


def down_projections(model: nn.Module) -> list[nn.Linear]:
    """The second linear layer of each block's MLP, whose inputs are the activations of its neurons.

    Raises InputError for models that do not support registers, and for unknown MLPs.
    """
    found = []
    for block in supported_blocks(model):
        layer = _first(block.module, _DOWN)
        if not isinstance(layer, nn.Linear):
            raise InputError(
                f"cannot find the neurons of {block.name!r} ({type(block.module).__name__}): its "
                f"MLP has none of the known linear layers {', '.join(_DOWN)}"
            )
        found.append(layer)
    return found


def write_directions(block: nn.Module, layer: nn.Linear) -> Float[Tensor, "dim neuron"]:
    """What each neuron adds to the residual stream for an activation of 1, including LayerScale."""
    scale = _first(block, _SCALE)
    weight = layer.weight.detach().float()
    return weight * scale.detach().float()[:, None] if isinstance(scale, Tensor) else weight


def _first(block: nn.Module, paths: tuple[str, ...]) -> object:
    """The first of these attributes that exists, or None."""
    found = (attribute(block, path) for path in paths)
    return next((value for value in found if value is not None), None)
