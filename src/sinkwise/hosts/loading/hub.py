"""Models built by a repository's own code, through torch.hub."""

import contextlib
import io
import os
import re
from typing import Any

import torch
from torch import nn

from sinkwise.errors import InputError
from sinkwise.hosts.loading.source import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    ImagePreprocessing,
    Source,
    unusable,
)

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(:[\w./-]+)?")


def load_hub(name: str) -> tuple[nn.Module, Source]:
    """`REPO/NAME`: the entry point NAME of a hubconf.py, called without arguments.

    REPO is a folder or a GitHub repository, `owner/repository` or `owner/repository:branch`. Its
    code runs, and may download more: writing `hub:` is consent to that.

    Raises InputError for any other form, and if the entry point fails or returns no module.
    """
    spec = f"hub:{name}"
    repository, _, entry = name.rpartition("/")
    local = os.path.isdir(repository)
    if not entry.isidentifier() or not (local or _REPOSITORY.fullmatch(repository)):
        raise InputError(
            f"model {spec!r} is not hub:REPO/NAME: REPO is owner/repository or a folder with a "
            "hubconf.py, NAME one of its entry points"
        )
    if local and not os.path.isfile(os.path.join(repository, "hubconf.py")):
        raise InputError(f"model {spec!r}: {repository} has no hubconf.py")
    source: Any = "local" if local else "github"
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # torch.hub prints its progress
            model = torch.hub.load(repository, entry, source=source, trust_repo=True, verbose=False)
    except MemoryError:
        raise
    except Exception as error:  # a repository's code raises anything
        hint = "an entry point of its hubconf.py that needs no arguments can be loaded"
        raise unusable(spec, error, hint) from error
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model {spec!r} is a {type(model).__name__}, not a torch module; NAME must return one"
        )
    return model, Source(spec, image=_image(model))


def _image(model: nn.Module) -> ImagePreprocessing | None:
    """ImageNet's mean and deviation at the size of the patch embedding, as DINO's code does."""
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    size = size[0] if isinstance(size, tuple) else size
    return None if size is None else ImagePreprocessing(size, IMAGENET_MEAN, IMAGENET_STD)
