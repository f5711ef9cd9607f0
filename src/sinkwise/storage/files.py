"""Files that are there whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
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


def check_new(path: Path) -> None:
    """Raise InputError where a folder that is to be made holds something already."""
    if path.is_dir() and any(path.iterdir()):
        raise InputError(f"{str(path)!r} is not empty: give a new folder, or empty that one")


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A new folder to write in, which becomes `path` when the block ends and is removed when it
    fails. Raises InputError where `path` holds something already, or cannot be made.
    """
    check_new(path)
    draft = None
    try:
        place = path.absolute()
        place.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}-"))
        yield draft
        os.chmod(draft, 0o777 & ~_umask())  # temporary folders are for their owner alone
        os.replace(draft, place)
    except OSError as error:
        raise InputError(f"{str(path)!r} could not be written: {error.strerror}") from error
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
