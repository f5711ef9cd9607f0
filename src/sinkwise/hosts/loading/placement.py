"""The dtype and the device of a loaded model."""

import torch

from sinkwise.errors import InputError

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
"""The dtypes that a model can be loaded in, by name."""


def dtype_named(dtype: torch.dtype | str | None) -> torch.dtype:
    """A dtype, also by name; float32 for None. Raises InputError for any other."""
    found = DTYPES.get("float32" if dtype is None else str(dtype).removeprefix("torch."))
    if found is None:
        raise InputError(f"dtype={dtype!r} is none of {', '.join(DTYPES)}")
    return found


def device_named(device: str) -> torch.device:
    """A device by name. Raises InputError if it does not exist."""
    try:
        found = torch.device(device)
    except RuntimeError:
        found = None
    if found is None or found.type not in ("cpu", "cuda", "mps"):
        raise InputError(f"device={device!r} is none of cpu, cuda, cuda:INDEX, mps")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"device={device!r} is not available: torch found {torch.cuda.device_count()} CUDA "
            "devices"
        )
    if found.type == "mps" and not torch.backends.mps.is_available():
        raise InputError(f"device={device!r} is not available: torch found no Apple GPU")
    return found
