"""One experiment with one seed: train the model, compute its signatures, and scan it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import nn

from sinkwise.experiments.checkpoints import (
    Losses,
    checkpoint_path,
    load_checkpoint,
    save_checkpoint,
)
from sinkwise.experiments.evaluation import layer_row, relative_error, scan_task
from sinkwise.scanning.result import Scan
from sinkwise.synthetic.forms import Experiment
from sinkwise.synthetic.signature import Signature, signatures
from sinkwise.synthetic.task import TaskBatch

TEST_SAMPLES = 128
"""Number of unseen samples on which a trained model is evaluated."""
TEST_SEED = 10_000
"""Their generator's seed, minus the task's seed."""
CURVE_POINTS = 200
"""Number of recorded points of a loss curve, approximately."""

Progress = Callable[[int, float], None]
"""Called with the step and the loss after every training step."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ExperimentRun:
    """A trained model with all its measurements."""

    experiment: Experiment
    seed: int
    model: nn.Module
    batch: TaskBatch
    """The unseen samples on which the model was evaluated."""
    losses: Losses
    """Points of the loss curve."""
    before: list[Signature]
    """Signatures of the untrained model, one per layer."""
    after: list[Signature]
    """Signatures of the trained model, one per layer."""
    error: float
    """Squared error relative to the squared update that the task requires; 0 is perfect."""
    scan: Scan
    rows: pl.DataFrame
    """One row per layer: the numbers of the tables."""

    @property
    def verdicts(self) -> list[str]:
        """The scan's verdict on each layer's head."""
        return layer_verdicts(self.scan)

    @property
    def right(self) -> bool:
        """Whether the verdicts are those that theory expects."""
        return self.experiment.right(self.verdicts, self.rows["update_share"].to_list())


def run_experiment(
    experiment: Experiment,
    seed: int,
    progress: Progress | None = None,
    checkpoints: Path | None = None,
) -> ExperimentRun:
    """Train with `seed`, then evaluate and scan the model on unseen samples.

    With a folder `checkpoints`, a model that an earlier run saved there is not trained again.
    """
    experiment = replace(experiment, task=replace(experiment.task, seed=seed))
    task = experiment.task
    generator = torch.Generator().manual_seed(seed)
    fixed = task.fixed(generator)
    untrained = task.model(generator).eval()
    model, losses = _load_or_train(experiment, progress, checkpoints)
    batch = task.sample(torch.Generator().manual_seed(TEST_SEED + seed), TEST_SAMPLES, fixed)
    sink = task.sink(batch)
    after = signatures(model, batch.inputs, sink)
    scan = scan_task(task, model, batch)
    error = relative_error(task, model, batch)
    rows: list[dict[str, Any]] = [
        {
            "seed": seed,
            "layer": layer,
            "error": error,
            **layer_row(task, signature, batch),
            "verdict": verdict,
        }
        for layer, (signature, verdict) in enumerate(zip(after, layer_verdicts(scan), strict=True))
    ]
    total = sum(row["update"] for row in rows)
    for row in rows:
        row["update_share"] = row["update"] / total if total else math.nan
    return ExperimentRun(
        experiment=experiment,
        seed=seed,
        model=model,
        batch=batch,
        losses=losses,
        before=signatures(untrained, batch.inputs, sink),
        after=after,
        error=error,
        scan=scan,
        rows=pl.DataFrame(rows),
    )


def layer_verdicts(scan: Scan) -> list[str]:
    """The verdict on each layer's head, for models with one head per layer."""
    return scan.heads.sort("layer")["verdict"].to_list()


def _load_or_train(
    experiment: Experiment, progress: Progress | None, checkpoints: Path | None
) -> tuple[Any, Losses]:
    """The trained model, from `checkpoints` if it is there, and points of its loss curve."""
    task = experiment.task
    path = None
    if checkpoints is not None:
        name = f"{experiment.kind}-{experiment.form}-{experiment.mitigation}"
        path = checkpoint_path(checkpoints, name, task.seed)
        model = task.model(torch.Generator()).eval()
        known_losses = load_checkpoint(path, model, task)
        if known_losses is not None:
            if progress is not None:
                for step in range(task.steps):
                    progress(step, math.nan)
            return model, known_losses
    every = max(1, task.steps // CURVE_POINTS)
    losses: Losses = []

    def record(step: int, loss: float) -> None:
        if step % every == 0 or step == task.steps - 1:
            losses.append((step, loss))
        if progress is not None:
            progress(step, loss)

    model = task.train(record)
    if path is not None:
        save_checkpoint(path, model, task, losses)
    return model, losses
