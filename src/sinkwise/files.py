"""Files that are there whole or not at all."""

import os
import tempfile
from pathlib import Path

from sinkwise.errors import InputError


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file by way of a temporary one beside it. Raises InputError where that fails."""
    name = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
            name = file.name
            file.write(content)
        os.chmod(name, 0o666 & ~_umask())  # temporary files are for their owner alone
        os.replace(name, path)
    except OSError as error:
        if name is not None:
            Path(name).unlink(missing_ok=True)
        raise InputError(f"{str(path)!r} could not be written: {error.strerror}") from error


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
