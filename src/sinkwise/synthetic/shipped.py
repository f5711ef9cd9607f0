"""The two trained models that come with the package: one NOP sink, one broadcast hub."""

import json
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import safe_open
from torch import Tensor

from sinkwise.errors import InputError
from sinkwise.synthetic.broadcast import Broadcast
from sinkwise.synthetic.damping import Damping
from sinkwise.synthetic.model import AttentionOnly

TASKS: dict[str, type[Damping] | type[Broadcast]] = {"nop": Damping, "broadcast": Broadcast}
"""The task behind each shipped model."""

DEMO: dict[str, dict[str, Any]] = {
    "nop": {"length": 64, "aligned_share": 0.98},
    "broadcast": {},
}
"""What the demonstration's inputs change in the task: nearly all queries must do nothing for the
null token to be a sink of the whole head (in training half of them must)."""

DEMO_BATCH = 64
"""Samples of the demonstration's inputs."""

DEMO_SEED = 2026
"""Seed of the demonstration's inputs."""


def load(path: Path) -> tuple[AttentionOnly, Damping | Broadcast, dict[str, Tensor]]:
    """The model in eval mode, its task, and the task's fixed vectors, from a file of `ship`."""
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["sinkwise"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}
    task = TASKS[about["name"]](**about["config"])
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "fixed": {}}
    for key, tensor in tensors.items():
        part, name = key.split(".", 1)
        parts[part][name] = tensor
    # A generator of its own leaves the global random state alone; the weights are replaced.
    model = task.model(torch.Generator())
    model.load_state_dict(parts["model"])
    return model.eval(), task, parts["fixed"]


def shipped(
    name: str,
) -> tuple[AttentionOnly, Float[Tensor, "batch token dim"]]:
    """A shipped model in eval mode and a fixed batch of inputs of its task.

    `nop`: position 0 is a null token, to which the aligned queries go to read a value near zero.
    `broadcast`: layer 0 sends one marked token, at a random place, to all. Raises InputError for
    another name.
    """
    if name not in TASKS:
        raise InputError(f"name={name!r} must be one of {', '.join(TASKS)}")
    with as_file(files("sinkwise.synthetic") / "weights" / f"{name}.safetensors") as path:
        model, task, fixed = load(path)
    generator = torch.Generator().manual_seed(DEMO_SEED)
    return model, replace(task, **DEMO[name]).sample(generator, DEMO_BATCH, fixed)[0]
