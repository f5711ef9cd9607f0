"""Trained models on disk, so that a stopped experiment goes on where it was."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from sinkwise.scanning.fingerprint import own_code
from sinkwise.storage.files import write_bytes
from sinkwise.synthetic.task import Task

_TRAINING = ("synthetic", "nn", "attention")
"""Packages whose code decides a trained model."""

Losses = list[tuple[int, float]]


def model_file(folder: Path, name: str, seed: int) -> Path:
    """Where the model of an experiment and seed is kept."""
    return folder / (re.sub(r"[^a-z0-9.-]+", "-", f"{name}-{seed}") + ".safetensors")


def facts(task: Task) -> dict[str, Any]:
    """Everything that decides a trained model, the code that trains it included."""
    about = {"task": type(task).__name__, **asdict(task), "torch": torch.__version__}
    return json.loads(json.dumps({**about, "sinkwise": own_code(*_TRAINING)}))


def keep_model(path: Path, model: nn.Module, task: Task, losses: Losses) -> None:
    """Write a trained model with its task and losses, whole or not at all."""
    about = json.dumps({**facts(task), "losses": losses})
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    write_bytes(path, save(tensors, {"sinkwise": about}))


def kept_model(path: Path, model: nn.Module, task: Task) -> Losses | None:
    """Load a kept model into `model` and return its losses; None where there is none of this task.

    A file of another task, another version of torch or of sinkwise's training code, or one that
    cannot be read counts as none.
    """
    try:
        with safe_open(path, "pt") as file:
            about = json.loads(file.metadata()["sinkwise"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None
    losses = about.pop("losses", [])
    if about != facts(task):
        return None
    model.load_state_dict(tensors)
    return [(int(step), float(loss)) for step, loss in losses]
