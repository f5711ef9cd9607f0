"""A mitigated model as a folder: weights, mitigations and model class, in one safetensors file."""

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
from sinkwise.hosts.loading.load import timm_image
from sinkwise.hosts.loading.source import source_of
from sinkwise.mitigations.base import Mitigation
from sinkwise.storage.files import whole_folder
from sinkwise.storage.versions import versions

WEIGHTS = "mitigated.safetensors"
"""Another name than transformers', which would read the file and leave the mitigations out."""
KEY = "sinkwise"
"""The entry of the file's metadata: a JSON of format, mitigations, model, image, aliases."""
FORMAT = 1


def save(
    model: nn.Module,
    mitigations: tuple[Mitigation, ...],
    plain: Mapping[str, torch.Size],
    folder: Path,
    timm_options: Mapping[str, Any] | None,
) -> None:
    """Write the folder, whole or not at all. `plain` are the names and shapes of the model's own
    state."""
    with whole_folder(folder) as draft:
        words = architecture.describe(model, draft, timm_options)
        tensors, aliases = _tensors(model)
        if words["library"] == "timm":
            _check_timm(words, plain, draft)
        source = source_of(model)
        image = None if source is None else source.image
        if source is None and words["library"] == "timm":
            image = timm_image(model)
        if source is not None and source.tokenizer is not None:
            source.tokenizer.save_pretrained(draft)
        facts = {
            "format": FORMAT,
            "mitigations": [{"name": one.name, **asdict(one)} for one in mitigations],
            "model": words,
            "image": None if image is None else asdict(image),
            "aliases": aliases,
            "versions": versions(),
        }
        save_file(tensors, draft / WEIGHTS, metadata={KEY: json.dumps(facts), "format": "pt"})


def _tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor of the state once, and the other names of those that are tied."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple, str] = {}
    for name, value in model.state_dict().items():
        same = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() and same in first:
            aliases[name] = first[same]
            continue
        first[same] = name
        # A view of a larger tensor would take all of it along.
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    return tensors, aliases


def _check_timm(words: dict[str, Any], plain: Mapping[str, torch.Size], draft: Path) -> None:
    """timm's models forget what they were made with: see now that they can be made again."""
    again = architecture.build(words, draft, torch.float32).state_dict()
    shapes = {name: value.shape for name, value in again.items()}
    wrong = [name for name in {**shapes, **plain} if shapes.get(name) != plain.get(name)]
    if wrong:
        name = wrong[0]
        raise InputError(
            f"timm.create_model({words['architecture']!r}, **{words['options']}) makes another "
            f"model: {name!r} is {_shape(shapes, name)} there and {_shape(plain, name)} here; give "
            "timm_options={...}, all that create_model was given beside the name"
        )


def _shape(shapes: Mapping[str, torch.Size], name: str) -> str:
    return str(list(shapes[name])) if name in shapes else "missing"
