"""A model without its weights: a description that is enough to build it again."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sinkwise.errors import InputError
from sinkwise.hosts.loading.optional import optional

TIMM_OPTIONS = ("num_classes", "global_pool", "dynamic_img_size")
"""Arguments of `timm.create_model` besides the name, as far as timm's models store them."""


def describe(
    model: nn.Module, folder: Path, timm_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The description that `build` needs; a transformers configuration is written to `folder`.

    `timm_options` are the arguments of `timm.create_model` besides the name, if there are more than
    the model stores. Raises InputError for models of neither transformers nor timm.
    """
    import transformers

    name = type(model).__name__
    architecture = (getattr(model, "pretrained_cfg", None) or {}).get("architecture")
    if timm_options is not None and architecture is None:
        raise InputError(f"timm_options={dict(timm_options)!r}: {name} is not a model of timm")
    if isinstance(model, transformers.PreTrainedModel):
        if getattr(transformers, name, None) is not type(model):
            raise InputError(
                f"{name} is not one of transformers' own classes and cannot be rebuilt; save its "
                "state_dict() instead"
            )
        model.config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        return {"library": "transformers", "class": name}
    if architecture is not None:
        known = {key: getattr(model, key, None) for key in TIMM_OPTIONS}
        options = {key: value for key, value in known.items() if value is not None}
        options |= timm_options or {}
        return {"library": "timm", "architecture": architecture, "options": options}
    raise InputError(
        f"{name} cannot be rebuilt, as it is not from transformers or timm.create_model; save its "
        "state_dict(), and mitigate the model again before loading it"
    )


def build(description: Mapping[str, Any], folder: Path, dtype: torch.dtype) -> nn.Module:
    """The described model at random weights.

    Raises InputError if its library is missing or does not know it.
    """
    if description["library"] == "timm":
        timm = optional("timm", extra="vision", needed_by="this model")
        name, options = description["architecture"], description["options"]
        try:
            model = timm.create_model(name, pretrained=False, **options)
        except (RuntimeError, TypeError, ValueError) as error:
            raise InputError(f"timm cannot build {name!r} with {options}: {error}") from error
        return model.to(dtype)
    import transformers

    cls = getattr(transformers, description["class"], None)
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        raise InputError(
            f"transformers {transformers.__version__} has no model {description['class']!r}; "
            "install a version that has it"
        )
    known: Any = cls  # transformers annotates these too narrowly
    model = known._from_config(known.config_class.from_pretrained(folder), dtype=dtype)
    if (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model
