"""The finished scan from everything that was observed."""

from dataclasses import asdict
from typing import Any

from torch import nn

from sinkwise.attention.screen import Screen
from sinkwise.core.records import AttentionSite
from sinkwise.diagnosis.rules import Rules
from sinkwise.errors import CaptureError, InputError
from sinkwise.measure.frames import Tables
from sinkwise.measure.spike import spikes
from sinkwise.scanning.observed import Observed
from sinkwise.scanning.result import Scan
from sinkwise.storage.versions import versions


def assemble(
    total: Observed,
    *,
    model: nn.Module,
    name: str,
    sites: dict[str, AttentionSite],
    rules: Rules,
    screen: Screen | None,
) -> Scan:
    """Lay out the frames and describe the scan.

    Raises CaptureError where no attention over tokens was seen, and InputError for a layout of the
    user that fits no call.
    """
    _check(total)
    known = {module: sites[module] for module in total.attending if module in sites}
    measured = {module: spikes(site) for module, site in known.items()}
    shares = {module: (v[0].tolist(), v[1]) for module, v in measured.items() if v is not None}
    tables = Tables(total.sums, rules, shares)
    events = tables.events()
    heads, layers = tables.heads(events), tables.layers()
    meta: dict[str, Any] = {
        "model": name,
        "class": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "samples": total.sums.samples,
        "rules": rules.describe(),
        "sites_measured": sorted(n for n, site in known.items() if site.source != "layout"),
        "sites_unknown": sorted(n for n in total.attending if n not in known),
        "output_unknown": sorted(
            n for n in total.attending if n not in known or known[n].o is None
        ),
        "screen": None if screen is None else {**asdict(screen), "calls": total.calls},
        "calls_skipped": sorted(total.skipped),
        "blocks_without_softmax_attention": _silent(total),
        "nonfinite": int(heads["nonfinite"].sum()),
        "versions": versions(),
    }
    return Scan(events, heads, layers, meta)


def _check(total: Observed) -> None:
    if not total.attending:
        names = ", ".join(sorted(total.skipped)) or "none"
        raise CaptureError(f"no attention over tokens was seen (calls skipped: {names})")
    if total.layout_length is not None and not total.layout_fits:
        lengths = ", ".join(map(str, sorted(total.key_lengths)))
        raise InputError(
            f"layout gives {total.layout_length} tokens per sample, but the model attends over "
            f"{lengths}; it must name every position that the model attends to"
        )


def _silent(total: Observed) -> list[str]:
    """Blocks that ran without softmax attention in some batch, and attended in none."""
    called = [f"{name}." for name in (*total.attending, *total.skipped)]
    return [
        block for block in total.silent if not any(name.startswith(f"{block}.") for name in called)
    ]
