"""Models of open_clip, by architecture and weights."""

from importlib import import_module

from torch import nn

from sinkwise.errors import InputError
from sinkwise.hosts.loading.source import ImagePreprocessing, Source, unusable


def load_open_clip(name: str) -> tuple[nn.Module, Source]:
    """`ARCH/TAG`: an architecture with one of its pretrained weights, or those of a file."""
    spec = f"open_clip:{name}"
    arch, _, tag = name.partition("/")
    if not tag:
        raise InputError(f"model {spec!r} is not open_clip:ARCH/TAG, such as ViT-B-32/openai")
    try:
        open_clip = import_module("open_clip")
    except ImportError as error:
        raise InputError(
            f"model {spec!r} needs open_clip: pip install 'sinkwise[open_clip]'"
        ) from error
    try:
        model = open_clip.create_model(arch, pretrained=tag, require_pretrained=True)
        facts = open_clip.get_model_preprocess_cfg(model)
    except MemoryError:
        raise
    except Exception as error:  # open_clip, the hub and torch raise a dozen kinds here
        hint = "a pair of open_clip.list_pretrained(), reachable or cached, or a file is right"
        raise unusable(spec, error, hint) from error
    size = facts["size"]
    image = ImagePreprocessing(
        size=size[0] if isinstance(size, (tuple, list)) else size,
        mean=tuple(facts["mean"]),
        std=tuple(facts["std"]),
        interpolation=facts["interpolation"],
    )
    return model, Source(spec, image=image)
