"""What identifies a scan, so that batches measured under other conditions are never mixed in."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sinkwise.attention.screen import Screen
from sinkwise.data.batch import tensor_bits, without_addresses
from sinkwise.diagnosis.rules import Rules
from sinkwise.storage.checksums import checksum
from sinkwise.storage.versions import versions

SAMPLED = 64
"""Values of each tensor that enter the checksum one by one; their sum is over all values."""


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


def weights_checksum(model: nn.Module) -> str:
    """Checksum of all parameters and buffers: of each its name, shape and dtype, the exact sum of
    its bits as integers (independent of the order of addition), and some of its values.
    """
    return checksum(_weights(model))


@torch.no_grad()
def _weights(model: nn.Module) -> Iterator[bytes | str]:
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        yield f"{name} {tuple(value.shape)} {value.dtype}"
        bits = tensor_bits(value)
        if bits is not None and bits.numel():
            step = max(1, bits.numel() // SAMPLED)
            yield bits[::step].cpu().to(torch.int64).numpy().tobytes()
            yield str(int(bits.sum(dtype=torch.int64)))


def own_code(*packages: str) -> str:
    """Checksum of sinkwise's own files, all or those of some packages: a change there may change
    any number that they compute.
    """
    root = Path(__file__).parents[1]
    folders = [root / package for package in packages] or [root]
    files = sorted(file for folder in folders for file in folder.rglob("*.py"))
    return checksum(str(file.relative_to(root)).encode() + file.read_bytes() for file in files)


def _code(function: Callable | None) -> str | None:
    """A function's name and a checksum of its own code, without the functions that it calls."""
    if function is None:
        return None
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
    code = getattr(function, "__code__", None)
    body = "" if code is None else f"{code.co_code!r} {code.co_consts!r} {code.co_names!r}"
    return f"{name} {checksum(without_addresses(body))}"
