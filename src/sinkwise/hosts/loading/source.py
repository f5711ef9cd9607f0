"""Where a model came from, recorded beside the model and never on it."""

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from sinkwise.errors import InputError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class ImagePreprocessing:
    """How a vision model's images are prepared: a square crop, normalized per channel."""

    size: int
    """Height and width of the crop, in pixels."""
    mean: tuple[float, float, float]
    """Mean of each channel, on values in [0, 1]."""
    std: tuple[float, float, float]
    """Standard deviation of each channel, on values in [0, 1]."""
    interpolation: str = "bicubic"
    """`nearest`, `bilinear`, `bicubic` or `lanczos`."""


@dataclass(frozen=True)
class Source:
    """The name that a model was loaded by, and how its inputs are prepared."""

    spec: str
    """The model name or folder given to `load`."""
    tokenizer: Any | None = None
    """The model's own tokenizer, if it has one."""
    image: ImagePreprocessing | None = None
    """The preprocessing of its images, if it takes any."""


# Weak, so that an entry never keeps a model's weights alive; by identity, as modules hash.
_SOURCES: WeakKeyDictionary[nn.Module, Source] = WeakKeyDictionary()


def register(model: nn.Module, source: Source) -> None:
    """Record where `model` came from, without changing the model itself."""
    _SOURCES[model] = source


def source_of(model: nn.Module) -> Source | None:
    """The source of `model`, or None if sinkwise did not load it."""
    return _SOURCES.get(model)


def unusable(spec: str, error: Exception, hint: str) -> InputError:
    """The error for a `spec` that a library failed to load: its first line, and a hint."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return InputError(f"model {spec!r} cannot be loaded: {lines[0].strip()} ({hint})")
