"""Train the shipped models: `python -m sinkwise.synthetic.ship [--folder FOLDER]`.

Takes about twenty seconds on one core. Without --folder it replaces the package's own files.
"""

import argparse
import json
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import safetensors
import torch
from safetensors.torch import save_file

from sinkwise.synthetic.shipped import TASKS

WEIGHTS = Path(__file__).parent / "weights"
"""The package's folder of trained models."""

SEED = 0
"""Seed of the shipped models."""


@contextmanager
def reproducible() -> Iterator[None]:
    """Within this context torch uses one thread and deterministic algorithms."""
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


def ship(name: str, folder: Path) -> Path:
    """Train one model and write `folder/NAME.safetensors`: weights, fixed vectors, metadata."""
    task = replace(TASKS[name], seed=SEED)
    with reproducible():
        model, fixed = task.train(), task.fixed()
    tensors = {f"model.{key}": tensor for key, tensor in model.state_dict().items()}
    tensors |= {f"fixed.{key}": tensor for key, tensor in fixed.items()}
    metadata = {
        "name": name,
        "task": type(task).__name__,
        "config": asdict(task),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "safetensors": safetensors.__version__,
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.safetensors"
    # A single entry: the order in which safetensors writes several changes from run to run.
    save_file(
        {key: tensor.contiguous() for key, tensor in tensors.items()},
        path,
        {"sinkwise": json.dumps(metadata)},
    )
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and write all shipped models."""
    parser = argparse.ArgumentParser(prog="python -m sinkwise.synthetic.ship")
    parser.add_argument("--folder", type=Path, default=WEIGHTS, help="folder to write to")
    folder = parser.parse_args(arguments).folder
    for name in TASKS:
        path = ship(name, folder)
        print(f"{path} ({path.stat().st_size:,} bytes)")


if __name__ == "__main__":
    main()
