"""The table and the figure of a comparison, against its runs."""

import math
from dataclasses import replace

import pytest

from sinkwise.reports.stream_figure import stream_figure
from sinkwise.reports.stream_table import restart_gap, restart_words, stream_rows, stream_table
from sinkwise.streaming.comparison.compare import perplexity
from sinkwise.streaming.comparison.methods import methods
from sinkwise.streaming.comparison.scoring import MethodRun, run_method
from tests.streaming.comparison import CACHE, LENGTH, SCORED
from tests.streaming.families import build, texts

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(scope="module")
def runs() -> list[MethodRun]:
    """All methods over one text."""
    model, tokens = build("llama"), texts(LENGTH)[0].tolist()
    return [run_method(model, tokens, one, 5) for one in methods(CACHE, [0, 1, 3])]


def test_rows_and_figure(runs: list[MethodRun]) -> None:
    rows = stream_rows(runs, CACHE)
    assert [row["cache"] for row in rows] == ["dense", "0 + 9", "recompute", "1 + 8", "3 + 6"]
    for one, row in zip(runs, rows, strict=True):
        assert row["perplexity"] == pytest.approx(perplexity(one, CACHE, SCORED))
        chosen = [
            loss
            for position, loss in zip(one.positions, one.losses, strict=True)
            if position in range(CACHE, SCORED, 5)
        ]
        assert row["at_recomputed"] == pytest.approx(math.exp(sum(chosen) / len(chosen)), rel=1e-5)
    alone = stream_rows([one for one in runs if one.method.kind != "recompute"], CACHE)
    assert [row["over_recomputed"] for row in alone] == [None] * 4
    short = replace(runs[0], positions=[1, 2, 3], losses=[1.0, 2.0, 3.0])
    ended = stream_rows([short, *runs[1:]], CACHE, {"dense": 2.5})[0]
    assert ended["last_quarter"] is None and ended["milliseconds"] == 2.5
    table = stream_table(runs, CACHE, "title")
    assert table.row_count == 5
    spec = stream_figure(runs, "title", CACHE).to_dict()
    (values,) = [spec["data"]["values"]]
    assert {row["cache"] for row in values} == {row["cache"] for row in rows}


def test_a_restarted_cache_is_compared_with_the_same_one(runs: list[MethodRun]) -> None:
    assert restart_gap(runs) is None and restart_words(runs) == ""
    three, positions = runs[-1], [18, 19, 43]
    losses = [three.losses[three.positions.index(at)] - 0.5 for at in positions]
    restarted = MethodRun(replace(three.method, restart_every=25), positions, losses, 0)
    found = restart_gap([*runs, restarted])
    assert found is not None and found.tokens == 3
    assert found.ratio == pytest.approx(math.exp(0.5))
    words = restart_words([*runs, restarted])
    assert "every 25 tokens" in words and "+64.9 ± 0.0 %" in words and "3 tokens" in words
