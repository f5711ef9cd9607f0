"""What a scan is, so that batches measured under other conditions are never mixed."""

import hashlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sinkwise.attention.screen import Screen
from sinkwise.data.batch import tensor_bits, without_addresses
from sinkwise.diagnosis.rules import Rules
from sinkwise.storage.versions import versions

SAMPLED = 64
"""Values of each tensor that are read one by one; the sum is over all."""


def facts(
    model: nn.Module,
    spec: str,
    inputs: dict[str, Any],
    rules: Rules,
    screen: Screen | None,
    layout: Callable[[Any], Any] | None,
    device: torch.device,
) -> dict[str, Any]:
    """Everything that decides what a scan measures, in words and checksums.

    `inputs` describes the data. Scans whose facts are equal measure the same.
    """
    config = getattr(model, "config", None)
    kernel = getattr(config, "_attn_implementation", None)
    return {
        "model": spec,
        "class": type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "weights": weights_checksum(model),
        "structure": _checksum(without_addresses(f"{model!r} {config!r} {kernel}")),
        "device": device.type,
        "rules": rules.describe(),
        "screen": None if screen is None else asdict(screen),
        "layout": _code(layout),
        "inputs": inputs,
        "versions": versions(),
        "sinkwise": own_code(),
    }


@torch.no_grad()
def weights_checksum(model: nn.Module) -> str:
    """Name, shape and kind of every parameter and buffer, the exact sum of their bits read as
    integers (any order of addition gives the same), and some of their values.
    """
    found = hashlib.blake2b(digest_size=16)
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        found.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        bits = tensor_bits(value)
        if bits is not None and bits.numel():
            step = max(1, bits.numel() // SAMPLED)
            found.update(bits[::step].cpu().to(torch.int64).numpy().tobytes())
            found.update(str(int(bits.sum(dtype=torch.int64))).encode())
    return found.hexdigest()


def own_code(*packages: str) -> str:
    """Checksum of sinkwise's own files, all or those of these packages: a change there may change
    any number that they make.
    """
    root = Path(__file__).parents[1]
    found = hashlib.blake2b(digest_size=16)
    folders = [root / package for package in packages] or [root]
    for file in sorted(file for folder in folders for file in folder.rglob("*.py")):
        found.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return found.hexdigest()


def _code(function: Callable | None) -> str | None:
    """A function's name, and a checksum of what it does; what it refers to is not followed."""
    if function is None:
        return None
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
    code = getattr(function, "__code__", None)
    body = "" if code is None else f"{code.co_code!r} {code.co_consts!r} {code.co_names!r}"
    return f"{name} {_checksum(without_addresses(body))}"


def _checksum(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
