"""The comparison's losses against oracles, and the command that prints them."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sinkwise.errors import InputError
from sinkwise.reports.stream_figure import stream_figure
from sinkwise.reports.stream_table import stream_rows, stream_table
from sinkwise.streaming.comparison import compare, resuming, timing
from sinkwise.streaming.comparison.compare import (
    Method,
    MethodRun,
    curve,
    gap,
    methods,
    perplexity,
    run_method,
)
from sinkwise.streaming.comparison.timing import step_times

from ..command import sinkwise
from ..tokenizers import word_tokenizer
from .families import build, expected, texts

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

LENGTH, CACHE = 60, 9
SCORED = LENGTH - compare.TIMED_STEPS


@pytest.fixture(scope="module")
def runs() -> list[MethodRun]:
    """All methods over one text."""
    model, tokens = build("llama"), texts(LENGTH)[0].tolist()
    return [run_method(model, tokens, one, 5) for one in methods(CACHE, [0, 1, 3])]


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
    monkeypatch.setattr(compare, "CHUNK", 7)
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
    for wrong, sinks in ((10, [2]), (11, [0])):
        with pytest.raises(InputError, match=f"restart_every={wrong}"):
            methods(5, sinks, wrong)
    assert methods(5, [0, 2, 1], 11)[-1] == Method("sinks", 5, 2, 11)


def test_gap_is_that_of_the_tokens_that_both_scored() -> None:
    one = MethodRun(Method("sinks", 2, 1), [1, 2, 3, 5], [9.0, 1.0, 2.0, 4.0], 0)
    other = MethodRun(Method("recompute", 2), [1, 2, 3, 4], [0.0, 0.5, 1.0, 1.0], 0)
    found = gap(one, other)  # differences 0.5 and 1: token 1 is before the cache is full
    assert found.tokens == 2
    assert found.ratio == pytest.approx(math.exp(0.75))
    assert found.standard_error == pytest.approx(math.exp(0.75) * math.sqrt(0.125) / math.sqrt(2))
    assert math.isnan(gap(one, MethodRun(other.method, [3], [1.0], 0)).ratio)


def test_memory_is_that_of_the_keys_kept(runs: list[MethodRun]) -> None:
    per_key = 2 * 2 * 3 * 8 * 4  # layers, keys and values, heads, head_dim, bytes
    dense, window, recompute, *sinks = runs
    assert dense.bytes == SCORED * per_key and recompute.bytes == 0
    assert {one.bytes for one in (window, *sinks)} == {CACHE * per_key}


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


def test_dense_attention_ends_where_learned_positions_do() -> None:
    model, tokens = build("gpt2"), texts(90)[0].tolist()
    one = run_method(model, tokens, Method("dense", CACHE))
    assert one.positions == list(range(1, 64))
    assert run_method(model, tokens, Method("sinks", CACHE, 3)).positions == list(range(1, 74))
    assert set(step_times(model, tokens, methods(CACHE, [3]))) >= {"dense", "3 + 6"}


def test_perplexity_is_the_exponential_of_the_mean() -> None:
    one = MethodRun(Method("dense", 4), [1, 2, 3, 4], [math.log(2), math.log(8), 0.0, 0.0], 0)
    assert perplexity(one, 1, 3) == pytest.approx(4.0)
    assert math.isnan(perplexity(one, 9, 12))
    assert list(curve(one, 2)) == [(1, pytest.approx(2.0)), (3, pytest.approx(8**0.5)), (5, 1.0)]


def test_names_and_mistakes() -> None:
    names = [one.name for one in methods(9, [0, 2])]
    assert names == ["dense", "0 + 9", "recompute", "2 + 7"]
    for wrong in (-1, 9):
        with pytest.raises(InputError, match=f"num_sink_tokens={wrong}"):
            methods(9, [wrong])
    with pytest.raises(InputError, match="25 tokens"):
        run_method(build("llama"), texts(25)[0].tolist(), Method("window", 9))


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


def test_courses_are_kept_and_only_for_the_same_facts(
    runs: list[MethodRun], tmp_path: Path
) -> None:
    facts = resuming.facts("llama", [1, 2, 3], 5)
    one = runs[-1]
    assert resuming.load(one.method, facts, tmp_path / "new") is None
    resuming.save(one, facts, tmp_path / "new")
    assert resuming.load(one.method, facts, tmp_path / "new") == one
    assert (
        resuming.load(one.method, resuming.facts("llama", [1, 2, 4], 5), tmp_path / "new") is None
    )
    longer = replace(one.method, kind="window", cache_length=9, num_sink_tokens=0)
    assert resuming.load(longer, facts, tmp_path / "new") is None
    file = tmp_path / "new" / "3+6.json"
    for unknown in ({**json.loads(file.read_text()), "milliseconds": 1.0}, {}):
        file.write_text(json.dumps(unknown))
        assert resuming.load(one.method, facts, tmp_path / "new") is None
    file.write_text("{")
    assert resuming.load(one.method, facts, tmp_path / "new") is None
    with pytest.raises(InputError, match="needs a tokenizer"):
        resuming.text_tokens(build("llama"), tmp_path / "book.txt", 9)


def test_the_command(tmp_path: Path) -> None:
    words = ["the", "sink", "draws", "attention", "from", "every", "query", "that", "says"]
    tokenizer: Any = word_tokenizer(words)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=24, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=3, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "book.txt").write_text(" ".join(words * 20), encoding="utf-8")
    options = ["--text", "book.txt", "--cache-length", 16, "--tokens", 90, "--recompute-every", 9]
    done = sinkwise("stream", "model", *options, "--num-sink-tokens", "0,1,4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("dense", "0 + 16", "recompute", "1 + 15", "4 + 12"):
        assert name in done.stdout
    assert (tmp_path / "stream" / "perplexity.png").read_bytes()[:4] == b"\x89PNG"
    kept = tmp_path / "stream" / "4+12.json"
    before = kept.stat().st_mtime_ns
    again = sinkwise("stream", "model", *options, "--num-sink-tokens", 4, "--json", cwd=tmp_path)
    rows = json.loads(again.stdout)["rows"]
    assert [row["cache"] for row in rows] == ["dense", "0 + 16", "recompute", "4 + 12"]
    assert kept.stat().st_mtime_ns == before  # not done twice
    anew = sinkwise("stream", "model", *options, "--restart-every", 40, cwd=tmp_path)
    assert "4 + 12, restarted" in anew.stdout and "restarted every 40 tokens" in anew.stdout
    anew = sinkwise("stream", "model", *options, "--restart-every", 40, "--json", cwd=tmp_path)
    assert json.loads(anew.stdout)["over_restarted"]["tokens"] == 10  # 32 to 39, 72, 73
    for wrong, match in (
        (["--restart-every", "32"], "sinkwise: --restart-every 32 must be 0, or more than"),
        (["--restart-every", "80", "--out", "none"], "--restart-every 80 must be less than 74"),
        (["--num-sink-tokens", "4,x"], "must be numbers separated by commas"),
        (["--num-sink-tokens", "16"], "sinkwise: --num-sink-tokens 16 must be"),
        (["--recompute-every", "0"], "at least 1"),
        (["--tokens", "20"], "the text has 20 tokens; it must have more than 32"),
    ):
        failed = sinkwise("stream", "model", *options, *wrong, cwd=tmp_path)
        assert failed.returncode == 2 and match in failed.stderr, failed.stderr
    assert not (tmp_path / "none").exists()  # said before any work
