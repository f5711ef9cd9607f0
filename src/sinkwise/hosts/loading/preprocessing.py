"""The tokenizer and the image preprocessing of a folder or Hub repository."""

import json
import warnings
from pathlib import Path
from typing import Any

from sinkwise.errors import InputError
from sinkwise.hosts.loading.source import IMAGENET_MEAN, IMAGENET_STD, ImagePreprocessing

_RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
"""Pillow's numbers, as preprocessor_config.json stores them."""

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
)


def repository_file(location: str, name: str) -> Path | None:
    """The file `name` of a folder or Hub repository, or None."""
    from transformers.utils import cached_file

    found = cached_file(
        location,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)


def tokenizer_in(spec: str, location: str) -> Any | None:
    """The tokenizer of a folder or Hub repository; None, with a warning, if it cannot be read."""
    # Checked first: transformers would create an empty tokenizer for a folder that has none.
    if not any(repository_file(location, name) for name in _TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(location, trust_remote_code=False)
    except Exception as error:  # the model is of use without it
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        warnings.warn(f"model {spec!r}: its tokenizer cannot be read: {first}", stacklevel=5)
        return None


def image_preprocessing_in(spec: str, location: str, config: Any) -> ImagePreprocessing | None:
    """The preprocessing of the model in a folder or Hub repository; None if it takes no images.

    Raises InputError for a damaged preprocessor_config.json.
    """
    file = repository_file(location, "preprocessor_config.json")
    try:
        facts = json.loads(file.read_text(encoding="utf-8")) if file else {}
    except ValueError as error:
        raise InputError(f"model {spec!r}: {file} is not JSON: {error}") from error
    size = None
    if facts.get("do_center_crop", True):
        size = _side(facts.get("crop_size"))
    size = size or _side(facts.get("size"))
    vision = getattr(config, "vision_config", None) or config
    size = size or _side(getattr(vision, "image_size", None))
    if size is None:
        return None
    return ImagePreprocessing(
        size=size,
        mean=tuple(facts.get("image_mean") or IMAGENET_MEAN),
        std=tuple(facts.get("image_std") or IMAGENET_STD),
        interpolation=_RESAMPLING.get(facts.get("resample", 3), "bicubic"),
    )


def _side(size: Any) -> int | None:
    """The side in pixels, from any of the forms in which transformers writes a size."""
    if isinstance(size, dict):
        named = (size.get(key) for key in ("height", "shortest_edge", "longest_edge"))
        return next((side for side in named if side), None)
    if isinstance(size, (list, tuple)):
        return size[0] if size else None
    return size
