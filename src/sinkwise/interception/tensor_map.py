"""A weak mapping from tensors to what is known about them, by identity."""

import weakref
from typing import Generic, TypeVar

from torch import Tensor

Value = TypeVar("Value")


class TensorMap(Generic[Value]):
    """Values of living tensors: an entry disappears with its tensor and never keeps it alive.

    Faster than `torch.utils.weak.WeakTensorKeyDictionary`, and any object may be looked up: every
    argument of every torch function is.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Tensor], Value]] = {}

    def get(self, key: object) -> Value | None:
        """The value of this very tensor, or None."""
        entry = self._entries.get(id(key))
        return entry[1] if entry is not None and entry[0]() is key else None

    def __setitem__(self, tensor: Tensor, value: Value) -> None:
        key = id(tensor)
        self._entries[key] = (weakref.ref(tensor, lambda gone: self._remove(key, gone)), value)

    def _remove(self, key: int, gone: weakref.ref) -> None:
        entry = self._entries.get(key)
        if entry is not None and entry[0] is gone:  # the address may belong to a newer tensor
            del self._entries[key]

    def __len__(self) -> int:
        return len(self._entries)

    def values(self) -> list[Value]:
        """The values of all living tensors."""
        return [value for _, value in list(self._entries.values())]

    def clear(self) -> None:
        """Remove every entry."""
        self._entries.clear()
