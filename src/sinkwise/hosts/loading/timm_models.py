"""Models of timm, by name."""

from importlib import import_module

from torch import nn

from sinkwise.hosts.loading.optional import optional
from sinkwise.hosts.loading.source import ImagePreprocessing, Source, unusable


def load_timm(name: str) -> tuple[nn.Module, Source]:
    """A pretrained model of timm. Raises InputError if timm cannot load it."""
    spec = f"timm:{name}"
    timm = optional("timm", extra="vision", needed_by=f"model {spec!r}")
    try:
        model = timm.create_model(name, pretrained=True)
    except MemoryError:
        raise
    except Exception as error:  # timm, huggingface_hub and torch raise a dozen kinds here
        hint = "give a name from timm.list_pretrained() that can be downloaded or is cached"
        raise unusable(spec, error, hint) from error
    return model, Source(spec, image=timm_preprocessing(model))


def timm_preprocessing(model: nn.Module) -> ImagePreprocessing:
    """The preprocessing of one of timm's models."""
    facts = import_module("timm.data").resolve_model_data_config(model)
    return ImagePreprocessing(
        size=facts["input_size"][-1],
        mean=tuple(facts["mean"]),
        std=tuple(facts["std"]),
        interpolation=facts["interpolation"],
    )
