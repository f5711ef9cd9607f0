"""`mitigate`: insert mitigations into a model in place, with a handle that removes them."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sinkwise.errors import InputError
from sinkwise.mitigations.base import Insertion, Mitigation
from sinkwise.mitigations.saving import save

ATTRIBUTE = "_sinkwise_mitigated"
"""The attribute of a mitigated model that stores its handle: a copy of the model copies it too."""


class Mitigated:
    """The mitigations in a model. As a context manager it removes them at the end."""

    def __init__(self, model: nn.Module, mitigations: tuple[Mitigation, ...]) -> None:
        self.model = model
        self.mitigations = mitigations
        self._original = {name: value.shape for name, value in model.state_dict().items()}
        self._insertions: list[Insertion] = []

    def undo(self) -> None:
        """Remove everything that was inserted, last first.

        Hooks, state_dict keys and outputs are as they were before, except for changes to the
        model's own weights since then. Trained gates, logits and registers are discarded.

        Raises InputError if the mitigations were removed already.
        """
        if self.model.__dict__.get(ATTRIBUTE) is not self:
            raise InputError(
                f"undo() was called before: {type(self.model).__name__} has no mitigations of this "
                "handle"
            )
        self._remove()
        del self.model.__dict__[ATTRIBUTE]

    def save(
        self, folder: str | os.PathLike[str], *, timm_options: Mapping[str, Any] | None = None
    ) -> None:
        """Write the model with its mitigations to a folder that `sw.load` and the commands read.

        The weights are one safetensors file, whose metadata describe the mitigations and the model;
        the tokenizer is saved beside it. A save that fails leaves nothing behind.

        timm's models are rebuilt by `timm.create_model`: if it was called with more than the name,
        the number of classes and the pooling, give those arguments as `timm_options`. Raises
        InputError if the model could not be rebuilt, and if the folder is not empty.
        """
        save(self.model, self.mitigations, self._original, Path(folder), timm_options)

    def insert(self, seed: int) -> None:
        """Apply all mitigations, or none of them if one cannot be applied."""
        generator = torch.Generator().manual_seed(seed)
        try:
            for mitigation in self.mitigations:
                mitigation.apply(self.model, generator, self._insertions)
        except BaseException:
            self._remove()
            raise
        self.model.__dict__[ATTRIBUTE] = self

    def _remove(self) -> None:
        while self._insertions:
            self._insertions.pop().undo()

    def __enter__(self) -> "Mitigated":
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


def mitigate(model: nn.Module, *mitigations: Mitigation, seed: int = 0) -> Mitigated:
    """Insert mitigations into a model in place, and return the handle that removes them.

    `mitigations` are `Gate(...)`, `SinkLogits(...)`, `Registers(...)` and the result of
    `find_register_neurons`. Their parameters join the model's own (`attn.output_gate...`) with the
    dtype and device of the weights beside them. Random values depend on `seed` only. After
    `handle.undo()`, or after leaving `with sw.mitigate(...)`, the model has the hooks, state_dict
    keys and, bit for bit, the outputs that it had before; a mitigation that fails leaves nothing
    behind. Save the model with `handle.save`: `save_pretrained` writes the weights of mitigations,
    but transformers ignores them when it loads.

    Raises InputError if no mitigation is given, one kind is given twice, the model is mitigated
    already, or it does not support one of them: the message says which layer and why.
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model is a {type(model).__name__}; give a module, such as sinkwise.load(name)"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InputError(
            f"{type(model).__name__} has no weights yet (meta device): load them first"
        )
    if not mitigations:
        raise InputError(
            "mitigate needs at least one mitigation: Gate('elementwise'), SinkLogits(), "
            "Registers(4)"
        )
    for mitigation in mitigations:
        if not isinstance(mitigation, Mitigation):
            raise InputError(
                f"{mitigation!r} is not a mitigation; give Gate(), SinkLogits() or Registers(4)"
            )
    names = [mitigation.name for mitigation in mitigations]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{name!r} was given {names.count(name)} times; give it once")
    if mitigated(model) is not None:
        raise InputError(
            f"{type(model).__name__} is mitigated already; call undo() on mitigated(model) first"
        )
    handle = Mitigated(model, mitigations)
    handle.insert(seed)
    return handle


def mitigated(model: nn.Module) -> Mitigated | None:
    """The handle of a mitigated model, also of one that `load` returned; None for other models."""
    return model.__dict__.get(ATTRIBUTE)
