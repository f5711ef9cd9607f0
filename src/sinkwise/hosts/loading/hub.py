"""Models from a repository's own code: torch.hub's, asked for by name."""

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

    REPO is a folder or a repository of GitHub, `owner/repository` or `owner/repository:branch`.
    Its code is run, with all that it downloads: writing `hub:` is consent to that.
    """
    spec = f"hub:{name}"
    place, _, entry = name.rpartition("/")
    local = os.path.isdir(place)
    if not entry.isidentifier() or not (local or _REPOSITORY.fullmatch(place)):
        raise InputError(
            f"model {spec!r} is not hub:REPO/NAME: a folder with a hubconf.py or owner/repository, "
            "and an entry point of it"
        )
    if local and not os.path.isfile(os.path.join(place, "hubconf.py")):
        raise InputError(f"model {spec!r}: {place} has no hubconf.py")
    source: Any = "local" if local else "github"
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # torch.hub prints what it does
            model = torch.hub.load(place, entry, source=source, trust_repo=True, verbose=False)
    except MemoryError:
        raise
    except Exception as error:  # foreign code raises anything
        hint = "an entry point of its hubconf.py that runs without arguments is right"
        raise unusable(spec, error, hint) from error
    if not isinstance(model, nn.Module):
        raise InputError(f"model {spec!r} is a {type(model).__name__}, not a torch module")
    return model, Source(spec, image=_image(model))


def _image(model: nn.Module) -> ImagePreprocessing | None:
    """ImageNet's colours at the size that the patch embedding was made for (DINO's way)."""
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    size = size[0] if isinstance(size, tuple) else size
    return None if size is None else ImagePreprocessing(size, IMAGENET_MEAN, IMAGENET_STD)
