"""The runs of every method on one text."""

import pytest

from sinkwise.streaming.comparison.methods import methods
from sinkwise.streaming.comparison.scoring import MethodRun, run_method

from ..families import build, texts
from . import CACHE, LENGTH


@pytest.fixture(scope="session")
def runs() -> list[MethodRun]:
    """Dense, window, recompute, one sink, three sinks."""
    model, tokens = build("llama"), texts(LENGTH)[0].tolist()
    return [run_method(model, tokens, one, 5) for one in methods(CACHE, [0, 1, 3])]
