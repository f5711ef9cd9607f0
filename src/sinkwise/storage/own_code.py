"""A checksum of sinkwise's own code."""

from pathlib import Path

from sinkwise.storage.checksums import checksum


def own_code(*packages: str) -> str:
    """Checksum of sinkwise's own files, all or those of some packages: a change there may change
    any number that they compute.
    """
    root = Path(__file__).parents[1]
    folders = [root / package for package in packages] or [root]
    files = sorted(file for folder in folders for file in folder.rglob("*.py"))
    return checksum(str(file.relative_to(root)).encode() + file.read_bytes() for file in files)
