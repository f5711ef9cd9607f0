"""A mitigated model as a folder: weights, mitigations and architecture in one safetensors file."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from sinkwise.errors import InputError
from sinkwise.hosts.loading import architecture
from sinkwise.hosts.loading.source import source_of
from sinkwise.hosts.loading.timm_models import timm_preprocessing
from sinkwise.mitigations.base import Mitigation
from sinkwise.storage.files import whole_folder
from sinkwise.storage.versions import versions

WEIGHTS = "mitigated.safetensors"
"""Not transformers' name: it would read the file and ignore the mitigations."""
KEY = "sinkwise"
"""The metadata entry of the file: JSON of format, mitigations, model, image, aliases, versions."""
FORMAT = 1
"""Version of this format; `load` reads no other."""


def save(
    model: nn.Module,
    mitigations: tuple[Mitigation, ...],
    original: Mapping[str, torch.Size],
    folder: Path,
    timm_options: Mapping[str, Any] | None,
) -> None:
    """Write the folder completely, or not at all.

    `original` maps the names of the model's own state to their shapes. Raises InputError if the
    model could not be rebuilt from the folder.
    """
    with whole_folder(folder) as draft:
        description = architecture.describe(model, draft, timm_options)
        tensors, aliases = _tensors(model)
        if description["library"] == "timm":
            _check_timm(description, original, draft)
        source = source_of(model)
        image = None if source is None else source.image
        if source is None and description["library"] == "timm":
            image = timm_preprocessing(model)
        if source is not None and source.tokenizer is not None:
            source.tokenizer.save_pretrained(draft)
        facts = {
            "format": FORMAT,
            "mitigations": [{"name": one.name, **asdict(one)} for one in mitigations],
            "model": description,
            "image": None if image is None else asdict(image),
            "aliases": aliases,
            "versions": versions(),
        }
        save_file(tensors, draft / WEIGHTS, metadata={KEY: json.dumps(facts), "format": "pt"})


def _tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor of the state once, and the other names of tied tensors."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple, str] = {}
    for name, value in model.state_dict().items():
        same = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() and same in first:
            aliases[name] = first[same]
            continue
        first[same] = name
        # A clone: saving a view would save all of the larger tensor.
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    return tensors, aliases


def _check_timm(
    description: dict[str, Any], original: Mapping[str, torch.Size], draft: Path
) -> None:
    """Rebuild the model now: timm's models do not store all arguments they were built with."""
    again = architecture.build(description, draft, torch.float32).state_dict()
    shapes = {name: value.shape for name, value in again.items()}
    wrong = [name for name in {**shapes, **original} if shapes.get(name) != original.get(name)]
    if wrong:
        name = wrong[0]
        raise InputError(
            f"timm.create_model({description['architecture']!r}, **{description['options']}) "
            f"builds a different model: {name!r} is {_shape(shapes, name)} there and "
            f"{_shape(original, name)} here; give timm_options={{...}}, all arguments of "
            "create_model besides the name"
        )


def _shape(shapes: Mapping[str, torch.Size], name: str) -> str:
    return str(list(shapes[name])) if name in shapes else "missing"
