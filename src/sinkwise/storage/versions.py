"""Versions of what produced a result."""

import importlib.metadata
import platform

PACKAGES = ("sinkwise", "torch", "transformers", "timm", "polars", "numpy")


def versions() -> dict[str, str]:
    """Version of Python and of each package that is installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
