"""Steps are timed with full caches."""

from typing import Any

import pytest
import torch

from sinkwise.streaming.comparison import timing
from sinkwise.streaming.comparison.methods import Method, methods
from sinkwise.streaming.comparison.timing import step_times

from ..families import build, texts
from . import CACHE, LENGTH, SCORED

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def test_steps_are_timed_with_caches_as_full_as_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = build("llama"), texts(LENGTH)[0].tolist()
    lengths: dict[str, set[int]] = {}
    stepping = timing._stepping

    def watched(model: Any, ids: torch.Tensor, cache: Any) -> Any:
        step = stepping(model, ids, cache)
        kind = f"{type(cache).__name__} {getattr(cache, 'retention', None)}"

        def run(at: int) -> Any:
            out = step(at)
            lengths.setdefault(kind, set()).add(cache.layers[0].keys.shape[2])
            return out

        return run

    monkeypatch.setattr(timing, "_stepping", watched)
    kinds = [*methods(CACHE, [0, 3]), Method("sinks", CACHE, 3, 25)]
    found = step_times(model, tokens, kinds)
    assert list(found) == ["dense", "0 + 9", "recompute", "3 + 6"]
    assert all(one > 0 for one in found.values())
    dense = lengths.pop("DynamicCache None")
    assert dense == set(range(SCORED + 1, LENGTH + 1))
    assert list(lengths.values()) == [{CACHE}, {CACHE}]
    assert not model.model._forward_hooks


def test_steps_of_a_text_longer_than_the_learned_positions() -> None:
    model, tokens = build("gpt2"), texts(90)[0].tolist()
    assert set(step_times(model, tokens, methods(CACHE, [3]))) >= {"dense", "3 + 6"}
