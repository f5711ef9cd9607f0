"""Models that transformers loads: from the Hub, from its cache, from a folder."""

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sinkwise.errors import InputError
from sinkwise.hosts.loading.preprocessing import (
    image_preprocessing_in,
    repository_file,
    tokenizer_in,
)
from sinkwise.hosts.loading.pypi import materialize
from sinkwise.hosts.loading.source import Source, unusable

_OPTIONAL_WEIGHTS = re.compile(
    r"(^|\.)(\w*pooler|\w*head|classifier|score|cls|\w*_projection|mask_token)(\.|$)"
)
"""Weights that a checkpoint of another task lacks and that feed no attention."""

_WEIGHT_FILES = {
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack", ".gguf"
}  # fmt: skip


def load_hf(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Source]:
    """A model of the Hub, or a folder in transformers' layout."""
    return _from_transformers(f"hf:{name}", name, dtype)


def load_pypi(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Source]:
    """A model from a PyPI wheel."""
    return _from_transformers(f"pypi:{name}", str(materialize(name)), dtype)


def _from_transformers(spec: str, location: str, dtype: torch.dtype) -> tuple[nn.Module, Source]:
    folder = Path(location)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise InputError(
            f"model {spec!r} is a folder without config.json; give one that save_pretrained wrote"
        )
    try:
        with _no_conversion():
            model, missing = _pretrained(location, dtype)
        tokenizer = tokenizer_in(spec, location)
        source = Source(spec, tokenizer, image_preprocessing_in(spec, location, model.config))
    except (InputError, MemoryError):
        raise
    except Exception as error:  # a damaged folder makes transformers raise nearly any kind
        raise unusable(spec, error, _hint(folder, error)) from error
    missing = sorted(key for key in missing if not _OPTIONAL_WEIGHTS.search(key))
    if missing:
        warnings.warn(
            f"model {spec!r}: {len(missing)} weights are not in the checkpoint and were "
            f"initialized at random, the first {missing[0]!r}",
            stacklevel=4,
        )
    return model, source


def _pretrained(location: str, dtype: torch.dtype) -> tuple[nn.Module, list[str]]:
    """The model and the keys that its checkpoint lacks; read from safetensors if there are any."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(location, trust_remote_code=False)
    named = getattr(transformers, (config.architectures or [""])[0], None)
    known = isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)
    chosen: Any = named if known else transformers.AutoModel
    safe = any(repository_file(location, f"model.safetensors{end}") for end in ("", ".index.json"))
    model, facts = chosen.from_pretrained(
        location,
        config=config,
        dtype=dtype,
        use_safetensors=safe,
        weights_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    return model, list(facts["missing_keys"])


def _hint(folder: Path, error: Exception) -> str:
    if "eights only" in str(error) or "weights_only" in str(error):
        return "its weights are a pickle that could run code; save them as safetensors"
    if not folder.is_dir():
        return "give a folder, or a Hub name that can be downloaded or is cached"
    weights = [path.name for path in sorted(folder.iterdir()) if path.suffix in _WEIGHT_FILES]
    found = ", ".join(weights) or "no weights"
    return f"give a folder with config.json and model.safetensors; this one has {found}"


@contextmanager
def _no_conversion() -> Iterator[None]:
    # Without this, transformers asks a bot to open a pull request on any repository that has no
    # safetensors.
    key = "DISABLE_SAFETENSORS_CONVERSION"
    before = os.environ.get(key)
    os.environ[key] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[key]
        else:
            os.environ[key] = before
