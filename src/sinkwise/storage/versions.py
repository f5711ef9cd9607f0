"""Versions of the software that produced a result."""

import importlib.metadata
import platform

PACKAGES = ("sinkwise", "torch", "transformers", "timm", "polars", "numpy")


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages among `PACKAGES`."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
