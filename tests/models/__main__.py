"""The table of architectures in docs/architectures.md, as `check_model` finds them:

    python -m tests.models > docs/architectures.md

About half a minute on one core.
"""

import re
import warnings
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from sinkwise.capturing.capture import capture
from sinkwise.conformance import CHECKS, Sample, check_model, observe
from sinkwise.core.records import AttentionRecord, AttentionSite
from sinkwise.errors import CaptureError
from sinkwise.interception.flex import is_flex

from . import CASES, EXTRA, NO_ATTENTION, Case, run
from .nn_models import STATE_SPACE

LIBRARIES = {
    "torch": "torch.nn", "timm": "timm", "transformers": "transformers", "open_clip": "open_clip",
    "dinov2": "facebookresearch/dinov2 (its layout)",
    "dinov3": "facebookresearch/dinov3 (its layout)",
}  # fmt: skip

HEAD = """# Architectures

![Number of architectures by library](architectures.png)

**Every check passes for every architecture below**, on small models built at random weights from
their configurations: bit-equal outputs, records that reproduce the model's own output, shapes,
probabilities, causality, key/value heads, output projections, layer numbers, and no trace left in
the model, also after an exception in the callback or in the model (`flex`: all except the checks
for traces). `sinkwise.check_model` runs the same checks on your own model.

- **kernels**: the attention implementations that the model can be set to; each was captured and
  gave the same calls.
- **calls**: softmax attention calls in one forward pass. **causal**: how many of them were found to
  be causal by changing the last token (empty for images).
- **map from**: `fields` if queries, keys, scale, mask, cap and sink logit determine the attention
  map; `map` if only the model's own map does (talking heads).
- **sites**: whether the weights of each head are known from a `layout`, `measured` from the
  Jacobian, or unknown (`none`).
- **silent blocks**: blocks without softmax attention, as `Coverage.silent` lists them.

The table is made by

    python -m tests.models > docs/architectures.md

with {versions}.

| name | class | library | kernels | calls | causal | map from | sites | silent blocks | notes |
|---|---|---|---|---:|---:|---|---|---|---|
"""

TAIL = """
## No softmax attention

`capture` raises CaptureError for these and makes no record.

| architecture | class | library |
|---|---|---|
"""


def names() -> list[str]:
    """All architectures, without their kernels."""
    return list(dict.fromkeys(architecture(case.name) for case in CASES + EXTRA))


def architecture(name: str) -> str:
    """The name of a case without its kernel."""
    return re.sub(r"-(sdpa|eager)$", "", name)


def row(name: str) -> str:
    """One line of the table."""
    cases = [case for case in CASES + EXTRA if architecture(case.name) == name]
    found = {kernel(case): observed(case) for case in cases}
    model, sample, causal = next(iter(found.values()))
    if flexible(cases[0]):
        found["flex"] = observed(cases[0], flex=True)
    counts = {len(sample.records) for _, sample, _ in found.values()}
    assert len(counts) == 1, f"{name}: the kernels differ in their calls: {counts}"
    records = sample.records
    sources = Counter("fields" if record.faithful else "map" for record in records)
    cells = [
        name,
        type(model).__name__.lstrip("_"),
        LIBRARIES[type(model).__module__.partition(".")[0]],
        ", ".join(found),
        str(len(records)),
        causal,
        shares(sources),
        shares(Counter(sites(sample).values())),
        ", ".join(f"`{block}`" for block in sample.coverage.silent),
        "; ".join(notes(records)),
    ]
    return "| " + " | ".join(cells) + " |"


def kernel(case: Case) -> str:
    """How the case attends, by its name."""
    end = case.name.rpartition("-")[2]
    return end if end in ("sdpa", "eager") else "torch's own"


def shares(counts: Counter) -> str:
    """One word where all agree, else how many of each."""
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{word} ({count})" for word, count in counts.items())


def flexible(case: Case) -> bool:
    """Whether the case's model can be set to FlexAttention and runs with it, uncompiled, here.

    transformers has no sink logits with it on a CPU, and T5's bias only for one sample.
    """
    model, inputs = case.build()
    if not getattr(model, "_supports_flex_attn", False):
        return False
    model.set_attn_implementation("flex_attention")
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), Watch() as watch:
            run(model, inputs)
    except (ValueError, IndexError):
        return False
    return watch.seen


class Watch(TorchFunctionMode):
    """Whether FlexAttention's operator was called: some models ignore what they are set to."""

    seen = False

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        self.seen |= is_flex(func)
        return func(*args, **(kwargs or {}))


def observed(case: Case, flex: bool = False) -> tuple[nn.Module, Sample, str]:
    """(model, what was observed, how many calls are causal); raises where a check fails."""
    model, inputs = case.build()
    checks = CHECKS
    if flex:
        model.set_attn_implementation("flex_attention")
        checks = CHECKS[:-3]  # those that would compile it
    results = {result.check: result for result in check_model(model, inputs, checks=checks)}
    causal = results["causality"]
    count = causal.message.partition(" ")[0] if causal.status == "passed" else ""
    return model, observe(model, inputs), count


def sites(sample: Sample) -> dict[str, str]:
    """How the weights of each attention module are known."""
    return {record.name: way(sample.sites.get(record.name)) for record in sample.records}


def way(site: AttentionSite | None) -> str:
    """How the weights of one attention module are known."""
    if site is None or (site.q is None and site.v is None):
        return "none"
    return "measured" if site.source == "jacobian" else site.source


def notes(records: list[AttentionRecord]) -> list[str]:
    """What is unusual about the calls."""
    found = []
    groups = {record.group for record in records} - {1}
    if groups:
        found.append(f"{', '.join(map(str, sorted(groups)))} query heads per key/value head")
    if any(record.q.shape[2] != record.k.shape[2] for record in records):
        found.append("more or fewer keys than queries")
    if any(record.mask.window is not None for record in records):
        found.append("sliding window")
    if any(record.softcap is not None for record in records):
        found.append("soft cap")
    if any(record.sink_logit is not None for record in records):
        found.append("sink logit")
    if any(record.mask.additive is not None and biased(record) for record in records):
        found.append("bias")
    if any(record.v.shape[3] != record.k.shape[3] for record in records):
        found.append("values of a different width")
    if len({record.name for record in records}) < len(records):
        found.append("modules run more than once")
    return found


def biased(record: AttentionRecord) -> bool:
    """Whether a mask adds something to the scores that it shows."""
    bias = record.mask.additive
    assert bias is not None
    shown = bias > torch.finfo(bias.dtype).min / 2
    return bool((bias[shown] != 0).any())


def without() -> list[str]:
    """Lines of models that have no softmax attention."""
    lines = []
    for name, make in {**NO_ATTENTION, **STATE_SPACE}.items():
        model, inputs = make()
        try:
            with torch.no_grad(), capture(model.eval(), lambda record: None):
                run(model, inputs)
        except CaptureError:
            library = LIBRARIES[type(model).__module__.partition(".")[0]]
            lines.append(f"| {name} | {type(model).__name__} | {library} |")
    return lines


def main() -> None:
    """Print the whole page."""
    warnings.simplefilter("ignore")
    packages = ("torch", "transformers", "timm", "open_clip_torch")
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    print(HEAD.format(versions=versions), end="")
    for name in names():
        print(row(name), flush=True)
    print(TAIL, end="")
    print("\n".join(without()))


if __name__ == "__main__":
    main()
