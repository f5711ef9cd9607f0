"""The losses of every method against the oracle."""

import pytest
import torch

from sinkwise.errors import InputError
from sinkwise.streaming.comparison import scoring
from sinkwise.streaming.comparison.methods import Method
from sinkwise.streaming.comparison.scoring import MethodRun, run_method

from ..families import build, expected, texts
from . import CACHE, LENGTH, SCORED

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def losses(logits: torch.Tensor) -> torch.Tensor:
    """−ln p of every scored token."""
    tokens = texts(LENGTH)[0].tolist()
    return -logits.log_softmax(-1)[range(SCORED - 1), tokens[1:SCORED]]


def test_losses_are_the_oracles(runs: list[MethodRun], monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = build("llama"), texts(LENGTH)[0].tolist()
    dense, window, recompute, one, three = runs
    expectations = [
        (dense, expected("llama", model, tokens, 0, LENGTH)),
        (window, expected("llama", model, tokens, 0, CACHE)),
        (one, expected("llama", model, tokens, 1, CACHE - 1)),
        (three, expected("llama", model, tokens, 3, CACHE - 3)),
    ]
    for ours, logits in expectations:
        assert ours.positions == list(range(1, SCORED))
        torch.testing.assert_close(
            torch.tensor(ours.losses).double(), losses(logits), rtol=0, atol=1e-4
        )
    assert recompute.positions == list(range(CACHE, SCORED, 5))
    for position, loss in zip(recompute.positions, recompute.losses, strict=True):
        row = tokens[position - CACHE : position]
        want = expected("llama", model, row, 0, CACHE)[-1].log_softmax(-1)[tokens[position]]
        assert loss == pytest.approx(-float(want), abs=1e-4)
    # Chunks of another length give the same.
    monkeypatch.setattr(scoring, "CHUNK", 7)
    again = run_method(model, tokens, three.method)
    assert again.losses == pytest.approx(three.losses, abs=1e-4)


def test_a_restarted_cache_scores_each_part_as_a_text_of_its_own() -> None:
    model, tokens = build("llama"), texts(LENGTH)[0].tolist()
    anew = run_method(model, tokens, Method("sinks", 5, 2, restart_every=17))
    assert anew.method.name == "2 + 3, restarted"
    want = {}
    for begin in range(0, SCORED, 17):
        part = tokens[begin : min(begin + 17, SCORED)]
        logits = expected("llama", model, part, 2, 3).log_softmax(-1)
        for number in range(10, len(part)):
            want[begin + number] = -float(logits[number - 1, part[number]])
    assert anew.positions == list(want)
    assert anew.losses == pytest.approx(list(want.values()), abs=1e-4)
    with pytest.raises(InputError, match="has no restart"):
        run_method(model, tokens, Method("sinks", 5, 2, restart_every=SCORED))


def test_memory_is_that_of_the_keys_kept(runs: list[MethodRun]) -> None:
    per_key = 2 * 2 * 3 * 8 * 4  # layers, keys and values, heads, head_dim, bytes
    dense, window, recompute, *sinks = runs
    assert dense.bytes == SCORED * per_key and recompute.bytes == 0
    assert {one.bytes for one in (window, *sinks)} == {CACHE * per_key}


def test_dense_attention_ends_where_learned_positions_do() -> None:
    model, tokens = build("gpt2"), texts(90)[0].tolist()
    one = run_method(model, tokens, Method("dense", CACHE))
    assert one.positions == list(range(1, 64))
    assert run_method(model, tokens, Method("sinks", CACHE, 3)).positions == list(range(1, 74))


def test_a_text_that_is_too_short() -> None:
    with pytest.raises(InputError, match="25 tokens"):
        run_method(build("llama"), texts(25)[0].tolist(), Method("window", 9))
