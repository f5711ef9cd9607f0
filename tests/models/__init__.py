"""Small models of every family at random weights, built from their configurations, not downloaded.

`CASES` lists them; `case.build()` seeds, builds and returns (model in eval mode, inputs), the
inputs being a tuple of positional arguments or a dict of keyword arguments.
"""

from . import hf_models, nn_models, sink_models, timm_models
from .case import CASES, EXTRA, GRID, Case, ids, padded, pixels, run, tensors
from .timm_models import NO_ATTENTION

__all__ = [
    "CASES", "EXTRA", "GRID", "NO_ATTENTION", "Case", "build", "hf_models", "ids", "nn_models",
    "padded", "pixels", "run", "sink_models", "tensors", "timm_models",
]  # fmt: skip


def build(name: str) -> tuple:
    """(model, inputs) of the case of that name."""
    return next(case for case in CASES + EXTRA if case.name == name).build()
