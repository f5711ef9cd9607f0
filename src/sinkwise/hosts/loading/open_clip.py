"""Models of open_clip, by architecture and weights."""

from torch import nn

from sinkwise.errors import InputError
from sinkwise.hosts.loading.optional import optional
from sinkwise.hosts.loading.source import ImagePreprocessing, Source, unusable


def load_open_clip(name: str) -> tuple[nn.Module, Source]:
    """`ARCH/TAG`: an architecture, and a tag or a file of its weights.

    Raises InputError for any other form, and if open_clip cannot load it.
    """
    spec = f"open_clip:{name}"
    arch, _, tag = name.partition("/")
    if not tag:
        raise InputError(
            f"model {spec!r} is not open_clip:ARCH/TAG, such as open_clip:ViT-B-32/openai"
        )
    open_clip = optional("open_clip", extra="open_clip", needed_by=f"model {spec!r}")
    try:
        model = open_clip.create_model(arch, pretrained=tag, require_pretrained=True)
        facts = open_clip.get_model_preprocess_cfg(model)
    except MemoryError:
        raise
    except Exception as error:  # open_clip, huggingface_hub and torch raise a dozen kinds here
        hint = "TAG must be a file, or a tag of open_clip.list_pretrained() that can be downloaded"
        raise unusable(spec, error, hint) from error
    size = facts["size"]
    image = ImagePreprocessing(
        size=size[0] if isinstance(size, (tuple, list)) else size,
        mean=tuple(facts["mean"]),
        std=tuple(facts["std"]),
        interpolation=facts["interpolation"],
    )
    return model, Source(spec, image=image)
