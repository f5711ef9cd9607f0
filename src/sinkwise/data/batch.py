"""Batches that are loaded on demand, and checksums that tell them apart."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sinkwise.storage.checksums import checksum

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class LazyBatch:
    """A batch of the input data that is loaded on demand."""

    load: Callable[[], Any]
    """Load the batch."""
    first: Callable[[], Any]
    """Load a batch with the same first sample; it need not contain the others."""
    key: Callable[[], str] | None = None
    """Checksum of the content; None where the description of the inputs identifies each batch."""


def batch_checksum(batch: Any) -> str:
    """Checksum of everything in a batch: tensors by their bits, and the place of each."""
    return checksum(_pieces(batch, ""))


def _pieces(value: Any, path: str) -> Iterator[bytes | str]:
    bits = tensor_bits(value) if isinstance(value, Tensor) else None
    if bits is not None:
        yield f"{path} {tuple(value.shape)} {value.dtype}"
        yield bits.cpu().numpy().tobytes()
    elif isinstance(value, Mapping):
        for key in value:
            yield from _pieces(value[key], f"{path}/{key}")
    elif isinstance(value, tuple | list):
        for number, item in enumerate(value):
            yield from _pieces(item, f"{path}/{number}")
    else:
        yield without_addresses(f"{path} {value!r}")


def tensor_bits(value: Tensor) -> Tensor | None:
    """The bits of a tensor as a vector of integers; None where it has no plain memory."""
    if value.layout != torch.strided or value.is_meta or value.is_nested:
        return None
    value = value.detach()
    value = torch.view_as_real(value) if value.is_complex() else value
    return value.contiguous().flatten().view(_INTEGERS[value.dtype.itemsize])


def without_addresses(text: str) -> str:
    """`text` without memory addresses of objects, which differ between processes."""
    return _ADDRESS.sub("", text)
