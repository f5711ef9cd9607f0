"""The functions that called an attention kernel, innermost first, without sinkwise's own."""

import sys
from collections.abc import Iterator
from types import FrameType

_MODELS = ("sinkwise.nn.", "sinkwise.synthetic.")
"""Packages of sinkwise whose functions are a model's own."""


def callers() -> Iterator[FrameType]:
    """The frames above the caller of this function that belong to a model or to its user."""
    frame: FrameType | None = sys._getframe().f_back
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith("sinkwise.") or module.startswith(_MODELS):
            yield frame
        frame = frame.f_back
