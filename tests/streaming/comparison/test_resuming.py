"""Runs on disk are used again, and only for the same facts."""

import json
from dataclasses import replace
from pathlib import Path

import torch

from sinkwise.streaming.comparison.resuming import facts as facts_of
from sinkwise.streaming.comparison.resuming import load_run, save_run
from sinkwise.streaming.comparison.scoring import MethodRun

from ..families import build


def test_runs_are_used_again_for_the_same_facts_only(runs: list[MethodRun], tmp_path: Path) -> None:
    model = build("llama")
    facts = facts_of(model, "llama", [1, 2, 3], 5)
    one = runs[-1]
    assert load_run(one.method, facts, tmp_path / "new") is None
    save_run(one, facts, tmp_path / "new")
    assert load_run(one.method, facts, tmp_path / "new") == one
    assert load_run(one.method, facts_of(model, "llama", [1, 2, 4], 5), tmp_path / "new") is None
    with torch.no_grad():
        model.lm_head.weight[3, 5] += 1e-3
    assert load_run(one.method, facts_of(model, "llama", [1, 2, 3], 5), tmp_path / "new") is None
    longer = replace(one.method, kind="window", cache_length=9, num_sink_tokens=0)
    assert load_run(longer, facts, tmp_path / "new") is None
    file = tmp_path / "new" / "3+6.json"
    for unknown in ({**json.loads(file.read_text()), "milliseconds": 1.0}, {}):
        file.write_text(json.dumps(unknown))
        assert load_run(one.method, facts, tmp_path / "new") is None
    file.write_text("{")
    assert load_run(one.method, facts, tmp_path / "new") is None
