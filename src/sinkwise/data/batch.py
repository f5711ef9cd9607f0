"""A batch that is not read before it is wanted, and what tells batches apart."""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class LazyBatch:
    """One batch of a feed."""

    load: Callable[[], Any]
    """The batch."""
    first: Callable[[], Any]
    """A batch that begins with the same sample, and need not hold the others."""
    key: Callable[[], str] | None = None
    """A checksum of what is in it; None where the feed's own description tells batches apart."""


def batch_checksum(batch: Any) -> str:
    """Checksum of all tensors in a batch, and of their places."""
    found = hashlib.blake2b(digest_size=16)

    def add(value: Any, path: str) -> None:
        bits = tensor_bits(value) if isinstance(value, Tensor) else None
        if bits is not None:
            found.update(f"{path} {tuple(value.shape)} {value.dtype}".encode())
            found.update(bits.cpu().numpy().tobytes())
        elif isinstance(value, Mapping):
            for key in value:
                add(value[key], f"{path}/{key}")
        elif isinstance(value, tuple | list):
            for number, item in enumerate(value):
                add(item, f"{path}/{number}")
        else:
            found.update(without_addresses(f"{path} {value!r}").encode())

    add(batch, "")
    return found.hexdigest()


def tensor_bits(value: Tensor) -> Tensor | None:
    """The tensor's bits as a row of integers; None where it has no memory of its own."""
    if value.layout != torch.strided or value.is_meta or value.is_nested:
        return None
    value = value.detach()
    value = torch.view_as_real(value) if value.is_complex() else value
    return value.contiguous().flatten().view(_INTEGERS[value.dtype.itemsize])


def without_addresses(text: str) -> str:
    """Text without the addresses of objects, which differ from process to process."""
    return _ADDRESS.sub("", text)
