"""The trained models that ship with the package: each mechanism, with and without mitigations."""

import json
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from sinkwise.errors import InputError
from sinkwise.synthetic.forms import experiment
from sinkwise.synthetic.model import AttentionOnly
from sinkwise.synthetic.task import Task, TaskBatch

TASKS: dict[str, Task] = {
    "nop": experiment("nop").task,
    "nop-gate": experiment("nop", mitigation="gate").task,
    "nop-register": experiment("nop", mitigation="register").task,
    "broadcast": experiment("broadcast").task,
    "broadcast-gate": experiment("broadcast", mitigation="gate").task,
    "broadcast-register": experiment("registers").task,
}
"""The training task of each shipped model."""

DEMO_LENGTH = 32
"""Content tokens per sample in the demonstration: twice as many as in training, for clear maps."""

DEMO_ALIGNED_SHARE = 0.98
"""In the demonstration nearly all queries need no update (in training half of them), so that the
null token is a sink by the event rule."""

DEMO_BATCH = 64
"""Number of samples in the demonstration."""

DEMO_SEED = 2026
"""Seed of the demonstration's inputs."""


def load_file(path: Path) -> tuple[AttentionOnly, Task, dict[str, Tensor]]:
    """Load a file written by `ship`: the model in eval mode, its task, and the fixed vectors."""
    with safe_open(path, "pt") as file:
        metadata = json.loads(file.metadata()["sinkwise"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}
    config: dict[str, Any] = dict(metadata["config"])
    config["betas"] = tuple(config["betas"])  # JSON has lists only
    task = replace(TASKS[metadata["name"]], **config)
    tensors_of: dict[str, dict[str, Tensor]] = {"model": {}, "fixed": {}}
    for key, tensor in tensors.items():
        owner, name = key.split(".", 1)
        tensors_of[owner][name] = tensor
    # A separate generator leaves the global random state alone; the weights are replaced.
    model = task.model(torch.Generator())
    model.load_state_dict(tensors_of["model"])
    return model.eval(), task, tensors_of["fixed"]


def load_shipped(name: str) -> tuple[AttentionOnly, Task, TaskBatch]:
    """A shipped model in eval mode, the demonstration's task, and a fixed batch of it.

    - `nop`: the aligned queries attend to a null token at position 0, whose value is near zero.
    - `broadcast`: layer 0 sends one marked token, at a random position, to all tokens.
    - `-gate` and `-register`: trained with that mitigation; `broadcast-register` with local
      attention, so that the broadcast must go through the register.

    Raises InputError for any other name.
    """
    if name not in TASKS:
        raise InputError(f"name={name!r} must be one of {', '.join(TASKS)}")
    with as_file(files("sinkwise.synthetic") / "weights" / f"{name}.safetensors") as path:
        model, task, fixed = load_file(path)
    changes: dict[str, Any] = {"length": DEMO_LENGTH}
    if hasattr(task, "aligned_share"):
        changes["aligned_share"] = DEMO_ALIGNED_SHARE
    task = replace(task, **changes)
    generator = torch.Generator().manual_seed(DEMO_SEED)
    return model, task, task.sample(generator, DEMO_BATCH, fixed)
