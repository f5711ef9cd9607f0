"""Files and folders that are written completely or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sinkwise.errors import InputError


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file through a temporary one beside it. Raises InputError if that fails."""
    name = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
            name = file.name
            file.write(content)
        os.chmod(name, 0o666 & ~_umask())  # temporary files are private to their owner
        os.replace(name, path)
    except OSError as error:
        if name is not None:
            Path(name).unlink(missing_ok=True)
        raise InputError(f"{str(path)!r} could not be written: {error.strerror}") from error


def check_new(path: Path) -> None:
    """Raise InputError if a folder that is to be created exists and is not empty."""
    if path.is_dir() and any(path.iterdir()):
        raise InputError(f"{str(path)!r} is not empty; give a new folder, or empty this one")


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A new folder to write to, which becomes `path` if the block succeeds and is removed if it
    fails. Raises InputError if `path` is not empty or cannot be created.
    """
    check_new(path)
    draft = None
    try:
        target = path.absolute()
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
        yield draft
        os.chmod(draft, 0o777 & ~_umask())  # temporary folders are private to their owner
        os.replace(draft, target)
    except OSError as error:
        raise InputError(f"{str(path)!r} could not be written: {error.strerror}") from error
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)


def _umask() -> int:
    """The umask of the process, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
