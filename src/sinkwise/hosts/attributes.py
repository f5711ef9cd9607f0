"""Attributes of modules from other libraries, by the names that are known for them."""

from torch import nn


def attribute(module: object, path: str) -> object:
    """The attribute at a dotted path, or None."""
    for part in path.split("."):
        module = getattr(module, part, None)
    return module


def first_int(module: nn.Module, names: tuple[str, ...]) -> int | None:
    """The first positive integer among these attributes of the module or its configuration."""
    for source in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(source, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None
