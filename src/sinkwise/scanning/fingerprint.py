"""What identifies a scan, so that batches measured under other conditions are never mixed in."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from sinkwise.attention.screen import Screen
from sinkwise.data.batch import without_addresses
from sinkwise.diagnosis.rules import Rules
from sinkwise.hosts.weights import weights_checksum
from sinkwise.storage.checksums import checksum
from sinkwise.storage.own_code import own_code
from sinkwise.storage.versions import versions


def facts(
    model: nn.Module,
    spec: str,
    inputs: dict[str, Any],
    rules: Rules,
    screen: Screen | None,
    layout: Callable[[Any], Any] | None,
    device: torch.device,
) -> dict[str, Any]:
    """Everything that determines what a scan measures, in words and checksums.

    `inputs` describes the data. Scans with equal facts give equal numbers.
    """
    config = getattr(model, "config", None)
    kernel = getattr(config, "_attn_implementation", None)
    return {
        "model": spec,
        "class": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "weights": weights_checksum(model),
        "structure": checksum(without_addresses(f"{model!r} {config!r} {kernel}")),
        "device": device.type,
        "rules": rules.describe(),
        "screen": None if screen is None else asdict(screen),
        "layout": _code(layout),
        "inputs": inputs,
        "versions": versions(),
        "sinkwise": own_code(),
    }


def _code(function: Callable | None) -> str | None:
    """A function's name and a checksum of its own code, without the functions that it calls."""
    if function is None:
        return None
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
    code = getattr(function, "__code__", None)
    body = "" if code is None else f"{code.co_code!r} {code.co_consts!r} {code.co_names!r}"
    return f"{name} {checksum(without_addresses(body))}"
