"""Trained models on disk, so that an interrupted experiment can resume."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from sinkwise.storage.files import write_bytes
from sinkwise.storage.own_code import own_code
from sinkwise.synthetic.task import Task

_TRAINING = ("synthetic", "nn", "attention")
"""Packages whose code determines a trained model."""

Losses = list[tuple[int, float]]
"""Points of a loss curve: step and loss."""


def checkpoint_path(folder: Path, name: str, seed: int) -> Path:
    """The file of an experiment's model for one seed."""
    return folder / (re.sub(r"[^a-z0-9.-]+", "-", f"{name}-{seed}") + ".safetensors")


def training_facts(task: Task) -> dict[str, Any]:
    """Everything that determines a trained model, including the code that trains it."""
    facts = {"task": type(task).__name__, **asdict(task), "torch": torch.__version__}
    return json.loads(json.dumps({**facts, "sinkwise": own_code(*_TRAINING)}))


def save_checkpoint(path: Path, model: nn.Module, task: Task, losses: Losses) -> None:
    """Write a trained model with its task and losses, atomically."""
    metadata = json.dumps({**training_facts(task), "losses": losses})
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    write_bytes(path, save(tensors, {"sinkwise": metadata}))


def load_checkpoint(path: Path, model: nn.Module, task: Task) -> Losses | None:
    """Load a saved model into `model` and return its losses; None if there is no such model.

    A file from another task, from another version of torch or of sinkwise's training code, or one
    that cannot be read does not count.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = json.loads(file.metadata()["sinkwise"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None
    losses = metadata.pop("losses", [])
    if metadata != training_facts(task):
        return None
    model.load_state_dict(tensors)
    return [(int(step), float(loss)) for step, loss in losses]
