"""What a trained small ViT does with its sinks: verdicts, where attention goes, norms."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import torch
from mitigation_synthetic import pathway_share
from small_vit import PATCH, SIDE, Answering, Pictures, Recipe, quality, test_pictures, trained
from torch import Tensor, nn

import sinkwise as sw
from sinkwise.attention.reference import attention
from sinkwise.core.layout import TokenLayout, code
from sinkwise.core.records import AttentionRecord
from sinkwise.diagnosis.rules import MeanRule, Rules
from sinkwise.hosts.sites import attention_sites
from sinkwise.nn.gate import OutputGate
from sinkwise.reports.synthetic_table import short, spread

RULES = {"mean": Rules(bidirectional=MeanRule()), "default": Rules()}
"""On the board one query in ten has something to do, so that `relaxed`, the default, sees a sink in
few pictures only: `mean` asks for 0.3 of all attention."""

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


class Reading:
    """One trained ViT, read on pictures of held-out digits."""

    def __init__(self, recipe: Recipe, model: Answering) -> None:
        pictures = test_pictures(recipe)
        trunk: Any = model.trunk
        registers = getattr(trunk, "registers", None)
        self.prefix = (0 if registers is None else registers.count) + trunk.num_prefix_tokens
        layout = _Layout(pictures, self.prefix - trunk.num_prefix_tokens, trunk.num_prefix_tokens)
        batch = [pictures.pixels]
        self.quality = quality(recipe, model, pictures)
        self.scans = {
            name: sw.scan(trunk, batch, rules=rules, layout=layout) for name, rules in RULES.items()
        }
        shares = _shares(trunk, pictures, self.prefix)
        self.numbers = {**_sums(self.scans["mean"].layers), **shares}
        self.numbers["pathway"] = pathway_share(trunk, pictures.pixels)

    def verdicts(self, rule: str) -> list[str]:
        """The verdict of each head."""
        return self.scans[rule].heads["verdict"].to_list()


class _Layout:
    """Names the tokens: registers, class token, patches of a digit, and empty ones as `other`."""

    def __init__(self, pictures: Pictures, registers: int, cls: int) -> None:
        self._ink, self._before = pictures.ink, [code("register")] * registers + [code("cls")] * cls

    def __call__(self, batch: Tensor) -> TokenLayout:
        before = torch.tensor(self._before).expand(len(batch), -1)
        patches = torch.where(self._ink, code("patch"), code("other"))
        return TokenLayout(torch.cat([before, patches], 1), (SIDE // PATCH, SIDE // PATCH))


def _sums(layers: pl.DataFrame) -> dict[str, float]:
    """Attention by kind, a mean over layers and heads; the largest norm over the median one."""
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
def _shares(trunk: nn.Module, pictures: Pictures, prefix: int) -> dict[str, float]:
    """What dim and bright patches give, a mean over layers and heads; the length of what they read
    at CLS and registers together, in units of a patch's value; and their gates' factor.
    """
    found: dict[str, list[float]] = {}
    queries = {"dim": pictures.silent, "bright": ~pictures.silent}
    sites = attention_sites(trunk)

    def on_record(record: AttentionRecord) -> None:
        weights = attention(
            record.q, record.k, record.v, scale=record.scale, sink_logit=record.sink_logit
        ).weights[:, :, prefix:]
        values = torch.einsum("bhkv,hov->bhko", record.v, sites[record.name].o)
        read = (weights[..., :prefix] @ values[:, :, :prefix]).norm(dim=-1)
        usual = values[:, :, prefix:].norm(dim=-1).mean(-1, keepdim=True)
        mass, spared = weights[..., :prefix].sum(-1), 1 - weights.sum(-1)
        for name, chosen in queries.items():
            mask = chosen[:, None].expand_as(mass)
            found.setdefault(f"{name}, prefix", []).append(float(mass[mask].mean()))
            found.setdefault(f"{name}, none", []).append(float(spared[mask].mean()))
            ratio = (read / usual)[mask].sum() / mass[mask].sum()
            found.setdefault(f"{name}, ratio", []).append(float(ratio))

    def on_gate(module: nn.Module, args: tuple[Tensor, Tensor], out: Tensor) -> None:
        assert isinstance(module, OutputGate)
        factor = module.factor(args[1]).mean(-1)[:, prefix:]
        for name, chosen in queries.items():
            found.setdefault(f"{name}, gate", []).append(float(factor[chosen].mean()))

    gates = [module for module in trunk.modules() if isinstance(module, OutputGate)]
    handles = [
        gate.register_forward_hook(on_gate)
        for name, gate in trunk.named_modules()
        if gate in gates and "pathway" not in name
    ]
    try:
        with sw.capture(trunk, on_record):
            trunk(pictures.pixels)
    finally:
        for handle in handles:
            handle.remove()
    return {name: sum(values) / len(values) for name, values in found.items()}


def read(recipe: Recipe, seeds: int, keep: Path) -> list[Reading]:
    """The readings of one mitigation's ViTs, trained or taken from `keep`."""
    recipes = [replace(recipe, seed=seed) for seed in range(seeds)]
    return [Reading(one, trained(one, keep)) for one in recipes]


def row(name: str, found: Sequence[Reading]) -> list[str]:
    """A row of the table: counts over all seeds' heads, means (least to greatest) over seeds."""
    return [
        name,
        spread([one.quality for one in found]),
        *[counts([one.verdicts(rule) for one in found]) for rule in RULES],
        places(found),
        _median_ratio(found),
        strongest(found),
        *[_over(found, key) for key in ("register", "cls", "none")],
        _over(found, "bright, gate"),
        _over(found, "norm"),
        _over(found, "pathway"),
    ]


def board_row(name: str, found: Sequence[Reading]) -> list[str]:
    """What the two kinds of queries do."""
    keys = (
        f"{kind}, {part}"
        for kind in ("dim", "bright")
        for part in ("prefix", "ratio", "none", "gate")
    )
    return [name, *[_over(found, key) for key in keys]]


def _over(found: Sequence[Reading], key: str) -> str:
    """A number over the seeds; what rounding alone has left is 0."""
    values = [one.numbers.get(key, math.nan) for one in found]
    return spread([0.0 if abs(value) < 1e-6 else value for value in values])


def counts(verdicts: Iterable[Sequence[str]]) -> str:
    """How many heads have a sink, and which: `12/32: 8 nop, 4 broadcast`."""
    all_heads = [verdict for one in verdicts for verdict in one]
    parts = [f"{all_heads.count(name)} {name}" for name in VERDICTS if name in all_heads]
    sinks = sum(all_heads.count(name) for name in VERDICTS)
    return f"{sinks}/{len(all_heads)}" + (f": {', '.join(parts)}" if parts else "")


WORDS = {"cls": "CLS", "register": "registers", "patch": "digit patches", "other": "empty patches"}


def places(found: Sequence[Reading]) -> str:
    """On which kinds of token the events of the rule `mean` lie."""
    kinds = pl.concat([one.scans["mean"].events["kind"] for one in found])
    if not len(kinds):
        return "-"
    shares = [(float((kinds == kind).mean()), words) for kind, words in WORDS.items()]
    return ", ".join(
        f"{words} {share:.0%}" for share, words in sorted(shares)[::-1] if share > 0.005
    )


def _sink_heads(found: Sequence[Reading]) -> pl.DataFrame:
    frames = [one.scans["mean"].heads.filter(pl.col("verdict") != "none") for one in found]
    return pl.concat(frames)


def _median_ratio(found: Sequence[Reading]) -> str:
    """The median value ratio over the heads with a sink."""
    heads = _sink_heads(found)
    return short(float(heads["value_ratio"].median())) if len(heads) else "-"


def strongest(found: Sequence[Reading]) -> str:
    """The head whose sink receives most, among those with a sink in half of the pictures."""
    heads = _sink_heads(found).filter(pl.col("sink_share") >= 0.5).sort("received")
    if not len(heads):
        return "-"
    top = heads.row(-1, named=True)
    return f"{top['received']:.2f} on {WORDS[top['kind']]}, ratio {short(top['value_ratio'])}"
