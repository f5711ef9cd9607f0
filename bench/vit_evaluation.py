"""The evaluation of a trained small ViT: verdicts, attention to its sinks, norms."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import torch
from mitigation_synthetic import pathway_share
from small_vit import (
    PATCH,
    SIDE,
    ImageBatch,
    PatchClassifier,
    Recipe,
    load_or_train,
    quality,
    test_images,
)
from torch import Tensor, nn

import sinkwise as sw
from sinkwise.attention.reference import attention
from sinkwise.core.layout import TokenLayout, code
from sinkwise.core.records import AttentionRecord
from sinkwise.diagnosis.rules import MeanRule, Rules
from sinkwise.hosts.sites import attention_sites
from sinkwise.nn.gate import OutputGate
from sinkwise.reports.synthetic_table import format_number, mean_and_range

RULES = {"mean": Rules(bidirectional=MeanRule()), "default": Rules()}
"""On the board one query in ten needs an update, so that `relaxed`, the default, finds a sink in
few images only; `mean` needs less attention."""

VERDICTS = ("nop", "broadcast", "mixed", "unclassified")

HEADINGS = (
    "mitigation", "quality", "heads with a sink, rule mean", "rule relaxed", "sinks lie on",
    "value ratio", "strongest head", "attention to registers", "to CLS", "to no token",
    "gate", "largest norm / median", "pathway's share of the updates",
)  # fmt: skip
BOARD_HEADINGS = (
    "mitigation", "dim patches: to CLS and registers", "value read there", "to no token", "gate",
    "bright patches: to CLS and registers", "value read there", "to no token", "gate",
)  # fmt: skip


class Evaluation:
    """The measurements of one trained ViT on images of held-out digits."""

    def __init__(self, recipe: Recipe, model: PatchClassifier) -> None:
        images = test_images(recipe)
        trunk: Any = model.trunk
        registers = getattr(trunk, "registers", None)
        self.prefix = (0 if registers is None else registers.count) + trunk.num_prefix_tokens
        layout = _Layout(images, self.prefix - trunk.num_prefix_tokens, trunk.num_prefix_tokens)
        batch = [images.pixels]
        self.quality = quality(recipe, model, images)
        self.scans = {
            name: sw.scan(trunk, batch, rules=rules, layout=layout) for name, rules in RULES.items()
        }
        shares = _shares(trunk, images, self.prefix)
        self.numbers = {**_sums(self.scans["mean"].layers), **shares}
        self.numbers["pathway"] = pathway_share(trunk, images.pixels)

    def verdicts(self, rule: str) -> list[str]:
        """The verdict of each head."""
        return self.scans[rule].heads["verdict"].to_list()


class _Layout:
    """Names the tokens: registers, class token, patches of a digit, and empty ones as `other`."""

    def __init__(self, images: ImageBatch, registers: int, cls: int) -> None:
        self._ink, self._before = images.ink, [code("register")] * registers + [code("cls")] * cls

    def __call__(self, batch: Tensor) -> TokenLayout:
        before = torch.tensor(self._before).expand(len(batch), -1)
        patches = torch.where(self._ink, code("patch"), code("other"))
        return TokenLayout(torch.cat([before, patches], 1), (SIDE // PATCH, SIDE // PATCH))


def _sums(layers: pl.DataFrame) -> dict[str, float]:
    """Mean attention to each kind of token over layers and heads; the largest norm ratio."""
    kinds = [name for name in layers.columns if name.startswith("received_")]
    given = {name: layers[name].mean() for name in kinds if name != "received_first"}
    ratios = layers["token_norm_max"] / layers["token_norm_median"]
    return {
        "register": given.get("received_register", math.nan),
        "cls": given["received_cls"],
        "none": 1 - sum(given.values()),
        "norm": float(ratios.max()),
    }


@torch.no_grad()
def _shares(trunk: nn.Module, images: ImageBatch, prefix: int) -> dict[str, float]:
    """Means over layers and heads for the dim and for the bright patches as queries.

    `prefix` is their attention to CLS and registers, `none` that to no token (a sink logit's
    share), `gate` the factor of their gates. `ratio` is the norm of the update that they receive
    from CLS and registers together, per unit of attention, relative to the mean norm of a patch's
    value.
    """
    columns: dict[str, list[float]] = {}
    queries = {"dim": images.silent, "bright": ~images.silent}
    sites = attention_sites(trunk)

    def on_record(record: AttentionRecord) -> None:
        weights = attention(
            record.q, record.k, record.v, scale=record.scale, sink_logit=record.sink_logit
        ).weights[:, :, prefix:]
        values = torch.einsum("bhkv,hov->bhko", record.v, sites[record.name].o)
        received = (weights[..., :prefix] @ values[:, :, :prefix]).norm(dim=-1)
        usual = values[:, :, prefix:].norm(dim=-1).mean(-1, keepdim=True)
        mass, to_none = weights[..., :prefix].sum(-1), 1 - weights.sum(-1)
        for name, chosen in queries.items():
            mask = chosen[:, None].expand_as(mass)
            columns.setdefault(f"{name}, prefix", []).append(float(mass[mask].mean()))
            columns.setdefault(f"{name}, none", []).append(float(to_none[mask].mean()))
            ratio = (received / usual)[mask].sum() / mass[mask].sum()
            columns.setdefault(f"{name}, ratio", []).append(float(ratio))

    def on_gate(module: nn.Module, args: tuple[Tensor, Tensor], out: Tensor) -> None:
        assert isinstance(module, OutputGate)
        factor = module.factor(args[1]).mean(-1)[:, prefix:]
        for name, chosen in queries.items():
            columns.setdefault(f"{name}, gate", []).append(float(factor[chosen].mean()))

    gates = [module for module in trunk.modules() if isinstance(module, OutputGate)]
    handles = [
        gate.register_forward_hook(on_gate)
        for name, gate in trunk.named_modules()
        if gate in gates and "pathway" not in name
    ]
    try:
        with sw.capture(trunk, on_record):
            trunk(images.pixels)
    finally:
        for handle in handles:
            handle.remove()
    return {name: sum(values) / len(values) for name, values in columns.items()}


def evaluate(recipe: Recipe, seeds: int, checkpoints: Path) -> list[Evaluation]:
    """The evaluations of one mitigation's ViTs over seeds, trained or loaded from `checkpoints`."""
    recipes = [replace(recipe, seed=seed) for seed in range(seeds)]
    return [Evaluation(one, load_or_train(one, checkpoints)) for one in recipes]


def row(name: str, runs: Sequence[Evaluation]) -> list[str]:
    """A row of the table: counts over the heads of all seeds, means (minimum to maximum)."""
    return [
        name,
        mean_and_range([one.quality for one in runs]),
        *[counts([one.verdicts(rule) for one in runs]) for rule in RULES],
        sink_kinds(runs),
        _median_ratio(runs),
        strongest(runs),
        *[_over(runs, key) for key in ("register", "cls", "none")],
        _over(runs, "bright, gate"),
        _over(runs, "norm"),
        _over(runs, "pathway"),
    ]


def board_row(name: str, runs: Sequence[Evaluation]) -> list[str]:
    """A row of the table of dim and bright patches as queries."""
    keys = (
        f"{kind}, {part}"
        for kind in ("dim", "bright")
        for part in ("prefix", "ratio", "none", "gate")
    )
    return [name, *[_over(runs, key) for key in keys]]


def _over(runs: Sequence[Evaluation], key: str) -> str:
    """A number over the seeds; rounding errors count as 0."""
    values = [one.numbers.get(key, math.nan) for one in runs]
    return mean_and_range([0.0 if abs(value) < 1e-6 else value for value in values])


def counts(verdicts: Iterable[Sequence[str]]) -> str:
    """The number of heads with a sink, and their verdicts: `12/32: 8 nop, 4 broadcast`."""
    all_heads = [verdict for one in verdicts for verdict in one]
    parts = [f"{all_heads.count(name)} {name}" for name in VERDICTS if name in all_heads]
    sinks = sum(all_heads.count(name) for name in VERDICTS)
    return f"{sinks}/{len(all_heads)}" + (f": {', '.join(parts)}" if parts else "")


WORDS = {"cls": "CLS", "register": "registers", "patch": "digit patches", "other": "empty patches"}


def sink_kinds(runs: Sequence[Evaluation]) -> str:
    """The kinds of token that are sinks by the rule `mean`, with their shares of the events."""
    kinds = pl.concat([one.scans["mean"].events["kind"] for one in runs])
    if not len(kinds):
        return "-"
    shares = [(float((kinds == kind).mean()), words) for kind, words in WORDS.items()]
    return ", ".join(
        f"{words} {share:.0%}" for share, words in sorted(shares)[::-1] if share > 0.005
    )


def _sink_heads(runs: Sequence[Evaluation]) -> pl.DataFrame:
    frames = [one.scans["mean"].heads.filter(pl.col("verdict") != "none") for one in runs]
    return pl.concat(frames)


def _median_ratio(runs: Sequence[Evaluation]) -> str:
    """The median value ratio of the heads with a sink."""
    heads = _sink_heads(runs)
    return format_number(float(heads["value_ratio"].median())) if len(heads) else "-"


def strongest(runs: Sequence[Evaluation]) -> str:
    """The head whose sink receives most, among those with a sink in at least half of the images."""
    heads = _sink_heads(runs).filter(pl.col("sink_share") >= 0.5).sort("received")
    if not len(heads):
        return "-"
    top = heads.row(-1, named=True)
    return (
        f"{top['received']:.2f} on {WORDS[top['kind']]}, ratio {format_number(top['value_ratio'])}"
    )
