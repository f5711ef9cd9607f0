"""Packages that only some models need."""

from importlib import import_module
from typing import Any

from sinkwise.errors import InputError


def optional(module: str, *, extra: str, needed_by: str) -> Any:
    """The module of an optional dependency. Raises InputError if it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise InputError(f"{needed_by} needs {module}: pip install 'sinkwise[{extra}]'") from error
