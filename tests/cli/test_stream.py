"""`sinkwise stream`, run as a user runs it."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.command import sinkwise
from tests.tokenizers import word_tokenizer


def test_caches_are_compared_and_runs_resumed(tmp_path: Path) -> None:
    words = ["the", "sink", "draws", "attention", "from", "every", "query", "that", "says"]
    tokenizer: Any = word_tokenizer(words)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=24, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=3, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "model")
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
    with torch.no_grad():
        model.model.embed_tokens.weight[0] += 0.5
    model.save_pretrained(tmp_path / "model")
    other = sinkwise("stream", "model", *options, "--num-sink-tokens", 4, "--json", cwd=tmp_path)
    assert kept.stat().st_mtime_ns > before  # the weights changed
    assert json.loads(other.stdout)["weights"] != json.loads(again.stdout)["weights"]
    anew = sinkwise("stream", "model", *options, "--restart-every", 40, cwd=tmp_path)
    assert "4 + 12, restarted" in anew.stdout and "restarted every 40 tokens" in anew.stdout
    anew = sinkwise("stream", "model", *options, "--restart-every", 40, "--json", cwd=tmp_path)
    assert json.loads(anew.stdout)["over_restarted"]["tokens"] == 10  # 32 to 39, 72, 73
    for wrong, match in (
        (
            ["--restart-every", "32"],
            "--restart-every 32 must be 0 (never) or more than 32",
        ),
        (["--restart-every", "80", "--out", "none"], "--restart-every 80 must be less than 74"),
        (["--num-sink-tokens", "4,x"], "must be numbers separated by commas"),
        (["--num-sink-tokens", "16"], "sinkwise: --num-sink-tokens 16 must be from 0 to 15, to"),
        (["--recompute-every", "0"], "sinkwise: --recompute-every must be at least 1; got 0"),
        (["--tokens", "20"], "the text has 20 tokens; it must have more than 32"),
    ):
        failed = sinkwise("stream", "model", *options, *wrong, cwd=tmp_path)
        assert failed.returncode == 2 and match in failed.stderr, failed.stderr
    assert not (tmp_path / "none").exists()  # refused before any work
