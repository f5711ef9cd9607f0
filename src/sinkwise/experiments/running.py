"""One experiment, one seed: train the model, read its signatures, and scan it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import nn

from sinkwise.core.layout import TokenLayout, code
from sinkwise.diagnosis.rules import MeanRule, Rules
from sinkwise.experiments.kept import Losses, keep_model, kept_model, model_file
from sinkwise.scanning.result import Scan
from sinkwise.scanning.scan import scan
from sinkwise.synthetic.forms import Experiment
from sinkwise.synthetic.signature import Signature, signatures
from sinkwise.synthetic.task import Sample, Task

TEST_SAMPLES = 128
"""Fresh samples that a trained model is read on."""
TEST_SEED = 10_000
"""Their generator's seed, less the task's own."""
CURVE_POINTS = 200
"""Points kept of a loss curve, at most."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Trained:
    """A trained model with everything that was read off it."""

    experiment: Experiment
    seed: int
    model: nn.Module
    sample: Sample
    losses: Losses
    before: list[Signature]
    """Signatures of the untrained model, a layer each."""
    after: list[Signature]
    error: float
    """Squared error over the squared update that the task asks for; 0 is perfect."""
    scan: Scan
    rows: pl.DataFrame
    """One row a layer: the numbers of the tables."""

    @property
    def verdicts(self) -> list[str]:
        """What the scan says of each layer's head."""
        return self.scan.heads.sort("layer")["verdict"].to_list()

    @property
    def right(self) -> bool:
        """Whether it says what the theory says."""
        return self.experiment.right(self.verdicts, self.rows["update_share"].to_list())


def run(
    experiment: Experiment,
    seed: int,
    progress: Callable[[int, float], None] | None = None,
    keep: Path | None = None,
) -> Trained:
    """Train with `seed`, then read and scan the model on samples it has not seen.

    A model that an earlier run left in the folder `keep` is not trained again.
    """
    task = replace(experiment.task, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    fixed = task.fixed(generator)
    untrained = task.model(generator).eval()
    model, losses = _trained(experiment, task, progress, keep)
    sample = task.sample(torch.Generator().manual_seed(TEST_SEED + seed), TEST_SAMPLES, fixed)
    sink = task.sink(sample)
    after = signatures(model, sample.inputs, sink)
    found = scan_of(task, model, sample)
    error = relative_error(task, model, sample)
    verdicts = found.heads.sort("layer")["verdict"].to_list()
    rows = [
        {"seed": seed, "layer": layer, "error": error, **row(task, one, sample), "verdict": verdict}
        for layer, (one, verdict) in enumerate(zip(after, verdicts, strict=True))
    ]
    total = sum(one["update"] for one in rows)
    for one in rows:
        one["update_share"] = one["update"] / total if total else math.nan
    return Trained(
        experiment=replace(experiment, task=task),
        seed=seed,
        model=model,
        sample=sample,
        losses=losses,
        before=signatures(untrained, sample.inputs, sink),
        after=after,
        error=error,
        scan=found,
        rows=pl.DataFrame(rows),
    )


def _trained(
    experiment: Experiment,
    task: Task,
    progress: Callable[[int, float], None] | None,
    keep: Path | None,
) -> tuple[Any, Losses]:
    """The trained model, from `keep` where it lies there, and points of its loss curve."""
    name = f"{experiment.kind}-{experiment.form}-{experiment.mitigation}"
    path = None if keep is None else model_file(keep, name, task.seed)
    if path is not None:
        model = task.model(torch.Generator()).eval()
        found = kept_model(path, model, task)
        if found is not None:
            if progress is not None:
                for step in range(task.steps):
                    progress(step, math.nan)
            return model, found
    every = max(1, task.steps // CURVE_POINTS)
    losses: Losses = []

    def note(step: int, loss: float) -> None:
        if step % every == 0 or step == task.steps - 1:
            losses.append((step, loss))
        if progress is not None:
            progress(step, loss)

    model = task.train(note)
    if path is not None:
        keep_model(path, model, task, losses)
    return model, losses


def row(task: Task, found: Signature, sample: Sample) -> dict[str, float]:
    """The numbers of one layer; NaN where there is nothing to average."""
    prefix = task.num_registers
    mass, gate = found.mass[:, prefix:], found.gate
    nop = task.idle(sample)
    active = ~nop
    active[:, : task.scored] = False
    gates = torch.full_like(mass, math.nan) if gate is None else gate[:, prefix:]
    received = found.attention.mean(1)
    moving = sample.marks.ndim == 1  # the sink's place differs from sample to sample
    source = math.nan
    if moving and prefix:
        rows = torch.arange(len(sample.marks))
        source = float(found.attention[rows, 0, sample.marks + prefix].mean())
    return {
        "mass_nop": float(mass[nop].mean()),
        "mass_active": float(mass[active].mean()),
        "mass": float(mass[:, task.scored :].mean()),
        "largest": float(received.amax(1).mean() if moving else received.mean(0).max()),
        "register_to_source": source,
        "uniform": 1 / found.attention.shape[-1],
        "column_share": found.column_share,
        "value_ratio": float(found.value_ratio.mean()),
        "value_ratio_raw": float(found.value_ratio_raw.mean()),
        "stable_rank": float(found.stable_rank.mean()),
        "spectral_gap": found.spectral_gap,
        "spike": float(found.spectrum[0] / found.spectrum.sum()),
        "update": float(found.update[:, prefix:].square().mean()),
        "gate_nop": float(gates[nop].mean()),
        "gate_active": float(gates[active].mean()),
        "similarity_before": found.similarity[0],
        "similarity_after": found.similarity[1],
    }


@torch.no_grad()
def relative_error(task: Task, model: nn.Module, sample: Sample) -> float:
    """Squared error over the squared update asked for; over the squared target where none is."""
    wrong = (model(sample.inputs) - sample.targets)[:, task.scored :].square().sum()
    asked = (sample.targets - sample.inputs)[:, task.scored :].square().sum()
    if not asked:
        asked = sample.targets[:, task.scored :].square().sum()
    return float(wrong / asked)


def rules_of(task: Task) -> Rules:
    """The `mean` rule, since half of the queries may have something to do; for queries as few as
    these, and for local attention, in which a token sees two keys.
    """
    rule = MeanRule(min_queries=min(task.length, MeanRule.min_queries), min_times_uniform=1.5)
    return Rules(causal=rule, bidirectional=rule)


def scan_of(task: Task, model: nn.Module, sample: Sample) -> Scan:
    """What `sinkwise.scan` says of the model on a sample."""
    return scan(model, [sample.inputs], rules=rules_of(task), layout=layout_of(task))


def layout_of(task: Task) -> Callable[[Any], TokenLayout]:
    """Names the tokens of a batch: registers, the null token, content."""

    def layout(batch: Any) -> TokenLayout:
        kinds = ["register"] * task.num_registers + ["special"] * task.scored
        kinds += ["text"] * (batch.shape[1] - task.scored)
        codes = torch.tensor([code(kind) for kind in kinds])
        return TokenLayout(codes.expand(len(batch), -1))

    return layout
