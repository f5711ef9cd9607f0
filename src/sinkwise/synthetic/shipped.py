"""The trained models that come with the package: each mechanism, plain and with each mitigation."""

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
from sinkwise.synthetic.task import Sample, Task

TASKS: dict[str, Task] = {
    "nop": experiment("nop").task,
    "nop-gate": experiment("nop", mitigation="gate").task,
    "nop-register": experiment("nop", mitigation="register").task,
    "broadcast": experiment("broadcast").task,
    "broadcast-gate": experiment("broadcast", mitigation="gate").task,
    "broadcast-register": experiment("registers").task,
}
"""The task behind each shipped model."""

DEMO_LENGTH = 32
"""Tokens of the demonstration's samples: twice as many as in training, so that maps show more."""

DEMO_ALIGNED_SHARE = 0.98
"""In the demonstration nearly all queries must do nothing, so that the null token is a sink of the
whole head (in training half of them must)."""

DEMO_BATCH = 64
"""Samples of the demonstration's inputs."""

DEMO_SEED = 2026
"""Seed of the demonstration's inputs."""


def load(path: Path) -> tuple[AttentionOnly, Task, dict[str, Tensor]]:
    """The model in eval mode, its task, and the task's fixed vectors, from a file of `ship`."""
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["sinkwise"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}
    config: dict[str, Any] = {**about["config"], "betas": tuple(about["config"]["betas"])}
    task = replace(TASKS[about["name"]], **config)
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "fixed": {}}
    for key, tensor in tensors.items():
        part, name = key.split(".", 1)
        parts[part][name] = tensor
    # A generator of its own leaves the global random state alone; the weights are replaced.
    model = task.model(torch.Generator())
    model.load_state_dict(parts["model"])
    return model.eval(), task, parts["fixed"]


def shipped(name: str) -> tuple[AttentionOnly, Task, Sample]:
    """A shipped model in eval mode, the demonstration's task, and a fixed sample of it.

    `nop`: position 0 is a null token, to which the aligned queries go to read a value near zero.
    `broadcast`: layer 0 sends one marked token, at a random place, to all. `-gate` and `-register`
    are trained with that mitigation (`broadcast-register` with local attention, so that the
    broadcast has to go through the register). Raises InputError for another name.
    """
    if name not in TASKS:
        raise InputError(f"name={name!r} must be one of {', '.join(TASKS)}")
    with as_file(files("sinkwise.synthetic") / "weights" / f"{name}.safetensors") as path:
        model, task, fixed = load(path)
    changes: dict[str, Any] = {"length": DEMO_LENGTH}
    if hasattr(task, "aligned_share"):
        changes["aligned_share"] = DEMO_ALIGNED_SHARE
    task = replace(task, **changes)
    generator = torch.Generator().manual_seed(DEMO_SEED)
    return model, task, task.sample(generator, DEMO_BATCH, fixed)
