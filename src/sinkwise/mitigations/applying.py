"""`mitigate`: mitigations put into a model in place, and the handle that takes them out again."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sinkwise.errors import InputError
from sinkwise.mitigations.base import Mitigation, Part
from sinkwise.mitigations.saving import save

ATTRIBUTE = "_sinkwise_mitigated"
"""Where a mitigated model carries its handle: a copy of the model then has a handle of its own."""


class Mitigated:
    """The mitigations that are in a model. As a context manager it undoes them at the end."""

    def __init__(self, model: nn.Module, mitigations: tuple[Mitigation, ...]) -> None:
        self.model = model
        self.mitigations = mitigations
        self._plain = {name: value.shape for name, value in model.state_dict().items()}
        self._parts: list[Part] = []

    def undo(self) -> None:
        """Take everything out, last first: hooks, parameters and outputs are what they were, as
        far as the model's own weights are. Trained gates and registers are lost with it.

        Raises InputError where it was undone before.
        """
        if self.model.__dict__.get(ATTRIBUTE) is not self:
            raise InputError(f"undo() was called before: {type(self.model).__name__} is plain")
        self._take_out()
        del self.model.__dict__[ATTRIBUTE]

    def save(
        self, folder: str | os.PathLike[str], *, timm_options: Mapping[str, Any] | None = None
    ) -> None:
        """Write the model with its mitigations as a folder, whole or not at all; `sw.load` and
        `sinkwise diagnose` read it. The weights are one safetensors file whose metadata say which
        mitigations are in it and which model it is; the model's own tokenizer goes along.

        timm's models are built again by `timm.create_model`; `timm_options` are what it was given
        beside the name, where that is more than number of classes and pooling. Raises InputError
        where the model could not be built again, or the folder holds something already.
        """
        save(self.model, self.mitigations, self._plain, Path(folder), timm_options)

    def _take_out(self) -> None:
        while self._parts:
            self._parts.pop().undo()

    def put_in(self, seed: int) -> None:
        """Apply all mitigations, or none where one cannot be applied."""
        generator = torch.Generator().manual_seed(seed)
        try:
            for mitigation in self.mitigations:
                mitigation.apply(self.model, generator, self._parts)
        except BaseException:
            self._take_out()
            raise
        self.model.__dict__[ATTRIBUTE] = self

    def __enter__(self) -> "Mitigated":
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


def mitigate(model: nn.Module, *mitigations: Mitigation, seed: int = 0) -> Mitigated:
    """Put mitigations into a model, in place, and return the handle that takes them out again.

    `mitigations` are `Gate(...)` and the like. What they learn is among the model's parameters at
    once (`attn.output_gate...`), in the dtype and on the device of the weights beside it. Random
    values come from `seed` alone. After `handle.undo()`, and after leaving `with sw.mitigate(...)`,
    the model has the hooks, state_dict keys and output bits that it had; a mitigation that fails
    leaves nothing behind. Keep the model with `handle.save`: `save_pretrained` writes weights that
    transformers leaves out when it reads them.

    Raises InputError where nothing is given, one kind is given twice, the model is mitigated
    already, or cannot take one of them: the message says which layer and why.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; sinkwise.load(name) makes a module")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InputError(
            f"{type(model).__name__} has no weights yet (meta device): load them first"
        )
    if not mitigations:
        raise InputError(
            "mitigate needs what to put in: Gate('elementwise'), SinkLogits(), Registers(4)"
        )
    for mitigation in mitigations:
        if not isinstance(mitigation, Mitigation):
            raise InputError(f"{mitigation!r} is no mitigation; Gate() and Registers(4) are")
    names = [mitigation.name for mitigation in mitigations]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{name!r} was given {names.count(name)} times; once is right")
    if mitigated(model) is not None:
        raise InputError(f"{type(model).__name__} is mitigated already: undo() takes that out")
    handle = Mitigated(model, mitigations)
    handle.put_in(seed)
    return handle


def mitigated(model: nn.Module) -> Mitigated | None:
    """The handle of a model that is mitigated, such as one that `load` read; None for others."""
    return model.__dict__.get(ATTRIBUTE)
