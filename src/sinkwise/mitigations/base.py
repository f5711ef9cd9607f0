"""What all mitigations have in common: a frozen description, and the parts it puts into a model."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class Part(ABC):
    """One thing put into a model. Its state are the modules it touches and no closures, so that a
    deep copy of a model takes parts of its own along."""

    @abstractmethod
    def undo(self) -> None:
        """Take it out again."""


class Child(Part):
    """A submodule added under a name that was free."""

    def __init__(self, owner: nn.Module, name: str, child: nn.Module) -> None:
        self._owner, self._name = owner, name
        owner.add_module(name, child)

    def undo(self) -> None:
        delattr(self._owner, self._name)


class Hooks(Part):
    """Hooks that were registered."""

    def __init__(self, handles: Sequence[RemovableHandle]) -> None:
        self._handles = list(handles)

    def undo(self) -> None:
        for handle in self._handles:
            handle.remove()


class Forward(Part):
    """A module's forward, replaced on this one object."""

    def __init__(self, owner: nn.Module, forward: Any) -> None:
        self._owner = owner
        self._before = owner.__dict__.get("forward")
        owner.forward = forward

    def undo(self) -> None:
        if self._before is None:
            del self._owner.forward
        else:
            self._owner.forward = self._before


class Value(Part):
    """An attribute with another value."""

    def __init__(self, owner: nn.Module, name: str, value: object) -> None:
        self._owner, self._name, self._before = owner, name, getattr(owner, name)
        setattr(owner, name, value)

    def undo(self) -> None:
        setattr(self._owner, self._name, self._before)


@dataclass(frozen=True)
class Mitigation(ABC):
    """Describes a mitigation; a frozen dataclass whose fields are numbers and words."""

    name: ClassVar[str]
    """What a saved folder calls it."""

    @abstractmethod
    def apply(self, model: nn.Module, generator: torch.Generator, parts: list[Part]) -> None:
        """Put it into `model`, random values from `generator`. Whatever was put in is in `parts`,
        also where this raises half way. Raises InputError where the model cannot take it.
        """
