"""What a model is without its weights: enough words to build it again."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sinkwise.errors import InputError

TIMM_OPTIONS = ("num_classes", "global_pool", "dynamic_img_size")
"""What `timm.create_model` was given beside the name, as far as timm's models remember it."""


def describe(
    model: nn.Module, folder: Path, timm_options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Words that `build` makes the model from; its configuration goes into `folder`.

    `timm_options` are what `timm.create_model` was given beside the name, if that is more than
    the model remembers. Raises InputError for models of neither transformers nor timm.
    """
    import transformers

    name = type(model).__name__
    architecture = (getattr(model, "pretrained_cfg", None) or {}).get("architecture")
    if timm_options is not None and architecture is None:
        raise InputError(f"timm_options={dict(timm_options)!r}: {name} is no model of timm's")
    if isinstance(model, transformers.PreTrainedModel):
        if getattr(transformers, name, None) is not type(model):
            raise InputError(f"{name} is not among transformers' own classes: it cannot be rebuilt")
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
        f"{name} can be saved if transformers, or timm.create_model, has made it; keep this one's "
        "state_dict() and mitigate it again"
    )


def build(words: Mapping[str, Any], folder: Path, dtype: torch.dtype) -> nn.Module:
    """The model that `describe` described, its weights drawn at random."""
    if words["library"] == "timm":
        try:
            timm = import_module("timm")
        except ImportError as error:
            raise InputError("this model needs timm: pip install 'sinkwise[vision]'") from error
        try:
            model = timm.create_model(words["architecture"], pretrained=False, **words["options"])
        except (RuntimeError, TypeError, ValueError) as error:
            raise InputError(
                f"timm cannot make {words['architecture']!r} with {words['options']}: {error}"
            ) from error
        return model.to(dtype)
    import transformers

    cls = getattr(transformers, words["class"], None)
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        raise InputError(f"transformers {transformers.__version__} has no model {words['class']!r}")
    known: Any = cls  # transformers annotates these too narrowly
    model = known._from_config(known.config_class.from_pretrained(folder), dtype=dtype)
    if (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model
