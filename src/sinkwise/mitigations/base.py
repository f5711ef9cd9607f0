"""What all mitigations share: a frozen description, and what it inserts into a model."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class Insertion(ABC):
    """One reversible change of a model.

    It refers to the modules it changes by attributes, never by a closure, so that a deep copy of
    the model has insertions of its own.
    """

    @abstractmethod
    def undo(self) -> None:
        """Reverse the change."""


class AddedModule(Insertion):
    """A submodule under a name that was free."""

    def __init__(self, owner: nn.Module, name: str, child: nn.Module) -> None:
        self._owner, self._name = owner, name
        owner.add_module(name, child)

    def undo(self) -> None:
        delattr(self._owner, self._name)


class AddedHooks(Insertion):
    """Hooks that were registered."""

    def __init__(self, handles: Sequence[RemovableHandle]) -> None:
        self._handles = list(handles)

    def undo(self) -> None:
        for handle in self._handles:
            handle.remove()


class ReplacedForward(Insertion):
    """Another forward for one module object; its class is unchanged."""

    def __init__(self, owner: nn.Module, forward: Any) -> None:
        self._owner = owner
        self._before = owner.__dict__.get("forward")
        owner.forward = forward

    def undo(self) -> None:
        if self._before is None:
            del self._owner.forward
        else:
            self._owner.forward = self._before


class ReplacedAttribute(Insertion):
    """Another value for an attribute."""

    def __init__(self, owner: nn.Module, name: str, value: object) -> None:
        self._owner, self._name, self._before = owner, name, getattr(owner, name)
        setattr(owner, name, value)

    def undo(self) -> None:
        setattr(self._owner, self._name, self._before)


@dataclass(frozen=True)
class Mitigation(ABC):
    """Describes a mitigation: a frozen dataclass whose fields are numbers and strings."""

    name: ClassVar[str]
    """The name of the mitigation in a saved folder."""

    @abstractmethod
    def apply(
        self, model: nn.Module, generator: torch.Generator, insertions: list[Insertion]
    ) -> None:
        """Insert the mitigation into `model`, with random values from `generator`.

        Every change is appended to `insertions` as it is made, so that it can be undone even if
        this method raises. Raises InputError if the model does not support the mitigation.
        """
