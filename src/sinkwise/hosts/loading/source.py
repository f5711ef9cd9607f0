"""Where a model came from, remembered beside the model and never on it."""

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from sinkwise.errors import InputError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class ImagePreprocessing:
    """How a vision model wants its pictures: a square crop, normalised channel by channel."""

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
    """The name a model was loaded by, and what its inputs need."""

    spec: str
    """What was given to `load`."""
    tokenizer: Any | None = None
    """The model's own tokenizer, where it has one."""
    image: ImagePreprocessing | None = None
    """The preprocessing of its pictures, where it takes any."""


# Weak, so that remembering a model never keeps its weights alive; by identity, as modules hash.
_SOURCES: WeakKeyDictionary[nn.Module, Source] = WeakKeyDictionary()


def register(model: nn.Module, source: Source) -> None:
    """Remember where `model` came from; the model itself is not touched."""
    _SOURCES[model] = source


def source_of(model: nn.Module) -> Source | None:
    """Where `model` came from, or None if it was not loaded by sinkwise."""
    return _SOURCES.get(model)


def unusable(spec: str, error: Exception, hint: str) -> InputError:
    """What to say when foreign code failed to load `spec`: its first line, and what would do."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return InputError(f"model {spec!r} cannot be loaded: {lines[0].strip()} ({hint})")
