"""The command, run as a user runs it."""

import json
from pathlib import Path

import polars as pl
import pytest
import torch
from PIL import Image
from transformers import (
    BertConfig,
    BertModel,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    PreTrainedTokenizerFast,
)

from tests.command import sinkwise
from tests.tokenizers import word_tokenizer

WORDS = [
    "the",
    "sink",
    "draws",
    "attention",
    "from",
    "every",
    "query",
    "that",
    "has",
    "nothing",
    "to",
    "say",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small text model, a small vision model, a text and some images."""
    root = tmp_path_factory.mktemp("cli")
    torch.manual_seed(0)
    tokenizer: PreTrainedTokenizerFast = word_tokenizer(WORDS)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=3,
        max_position_embeddings=64,
    )
    BertModel(config).save_pretrained(root / "bert")
    tokenizer.save_pretrained(root / "bert")
    vision = Dinov2WithRegistersConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        image_size=56,
        patch_size=14,
        num_register_tokens=4,
    )
    Dinov2WithRegistersModel(vision).save_pretrained(root / "vit")
    (root / "vit" / "preprocessor_config.json").write_text(
        json.dumps({"size": {"height": 56, "width": 56}, "image_mean": [0.5] * 3})
    )
    (root / "book.txt").write_text(" ".join(WORDS * 60))
    (root / "photos").mkdir()
    for index in range(3):
        Image.new("RGB", (70, 61), (40 * index, 90, 120)).save(root / "photos" / f"{index}.png")
    return root


def test_a_text_model_is_diagnosed(folder: Path) -> None:
    done = sinkwise("diagnose", "bert", "--text", "book.txt", "--samples", 3, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "Prescription:" in done.stdout
    assert "layer" in done.stdout
    saved = folder / "scan"
    assert {path.name for path in saved.iterdir()} == {
        "events.parquet",
        "heads.parquet",
        "layers.parquet",
        "scan.json",
        "heads.png",
    }
    heads = pl.read_parquet(saved / "heads.parquet")
    assert heads.shape[0] == 2 * 3
    assert heads["samples"].to_list() == [3] * 6
    # No length was given: all 64 positions that the model has.
    assert (saved / "heads.png").read_bytes()[:4] == b"\x89PNG"


def test_a_vision_model_is_diagnosed_as_json(folder: Path) -> None:
    done = sinkwise(
        "diagnose", "vit", "--images", "photos", "--json", "--out", "v", "--batch-size", 2,
        cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["samples"] == 3
    assert told["prescription"] in ("none", "gate", "registers", "gate+registers")
    assert len(told["layers"]) == 2
    layers = pl.read_parquet(folder / "v" / "layers.parquet")
    shares = layers.select("received_cls", "received_register", "received_patch")
    assert shares.sum_horizontal().to_list() == pytest.approx([1.0, 1.0], abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["diagnose", "nope", "--text", "book.txt"], "nope"),
        (["diagnose", "hf:", "--text", "book.txt"], "hf:"),
        (["diagnose", "bert"], "--text"),
        (["diagnose", "bert", "--text", "book.txt", "--images", "photos"], "--text"),
        (["diagnose", "bert", "--text", "missing.txt"], "missing.txt"),
        (["diagnose", "bert", "--text", "short.txt"], "short.txt"),
        (["diagnose", "bert", "--text", "book.txt", "--length", "65"], "64"),
        (["diagnose", "bert", "--text", "book.txt", "--size", "9"], "--size"),
        (["diagnose", "vit", "--images", "photos", "--length", "9"], "--length"),
        (["diagnose", "vit", "--images", "empty"], "empty"),
        (["diagnose", "vit", "--images", "broken"], "broken"),
        (["diagnose", "vit", "--images", "book.txt"], "book.txt"),
        (["diagnose", "vit", "--text", "book.txt"], "tokenizer"),
        (["diagnose", "bert", "--images", "photos"], "images need"),
        (["diagnose", "bert", "--text", "book.txt", "--rule", "odd"], "relaxed"),
        (["diagnose", "bert", "--text", "book.txt", "--dtype", "int8"], "int8"),
        (["diagnose", "bert", "--text", "book.txt", "--device", "tpu"], "tpu"),
        (["diagnose", "bert", "--text", "book.txt", "--samples", "0"], "sinkwise: --samples"),
        (["diagnose", "bert", "--text", "book.txt", "--out", "photos"], "photos"),
        (["diagnose", "bert", "--text", "book.txt", "--samples", "many"], "samples"),
        (["diagnose", "pickled", "--text", "book.txt"], "pickled"),
    ],
)
def test_a_mistake_is_one_clear_line(folder: Path, arguments: list[str], word: str) -> None:
    (folder / "short.txt").write_text("the sink")
    (folder / "empty").mkdir(exist_ok=True)
    (folder / "broken").mkdir(exist_ok=True)
    (folder / "broken" / "a.png").write_bytes(b"no picture")
    if not (folder / "pickled").exists():
        (folder / "pickled").mkdir()
        config = (folder / "bert" / "config.json").read_text()
        (folder / "pickled" / "config.json").write_text(config)
        torch.save({"weights": Path}, folder / "pickled" / "pytorch_model.bin")
    before = {path for path in folder.rglob("*") if path.is_file()}
    out = [] if "--out" in arguments else ["--out", "never"]
    done = sinkwise(*arguments, *out, cwd=folder)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert word in done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("sinkwise: ")]
    assert len(told) == 1 or "Usage:" in done.stderr
    assert {path for path in folder.rglob("*") if path.is_file()} == before
    assert not (folder / "never").exists()


def test_the_demo_shows_one_of_each_mechanism(tmp_path: Path) -> None:
    done = sinkwise("demo", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = {json.loads(line)["model"]: json.loads(line) for line in done.stdout.splitlines()}
    verdicts = {name.removeprefix("demo:"): one["prescription"] for name, one in found.items()}
    assert verdicts["nop"] == verdicts["nop-register"] == "gate" and verdicts["nop-gate"] == "none"
    assert verdicts["broadcast-gate"] == "registers"
    assert found["demo:nop"]["layers"][0]["ratio"] < 0.05
    assert found["demo:broadcast"]["layers"][0]["broadcast"] == 1.0
    both = found["demo:broadcast-register"]["layers"]
    assert [both[0]["nop"], both[1]["broadcast"]] == [1.0, 1.0]
    assert all(one["error"] < 0.05 for one in found.values())
    assert (tmp_path / "sinkwise-demo" / "nop" / "heads.png").is_file()
    page = (tmp_path / "sinkwise-demo" / "index.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 9 and "The same stripe, two algorithms" in page


def test_synthetic_trains_and_keeps_what_it_shows(tmp_path: Path) -> None:
    options = ["--mitigation", "gate", "--seeds", "1", "--out", "nop"]
    done = sinkwise("synthetic", "nop", *options, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (one,) = json.loads(done.stdout)["experiments"]
    assert one["expected"] == "no sink" and one["task"]["gate"] == "elementwise"
    assert one["seeds"][0]["right"] and one["seeds"][0]["prescription"] == "none"
    assert one["seeds"][0]["layers"][0]["register_to_source"] is None
    names = {path.name for path in (tmp_path / "nop").iterdir()}
    wanted = {"loss.png", "map-0-before.png", "map-0-after.png", "spectrum-0.png"}
    assert names == wanted | {"page.html", "rows.json", "table.md", "models"}
    told = sinkwise("synthetic", "nop", "--seeds", "1", cwd=tmp_path)
    assert "the scan says so in 1 of 1 seeds" in told.stdout
    assert "min_queries=16" in told.stdout


def test_synthetic_logit(tmp_path: Path) -> None:
    done = sinkwise("synthetic", "logit", "--out", "logit", cwd=tmp_path)
    lines = {line.split()[0]: line.split() for line in done.stdout.splitlines() if "%" in line}
    assert lines["none"][1:4] == ["1.00", "0%", "0.83"]
    assert lines["3"][1:4] == ["0.23", "77%", "0.19"]
    assert (tmp_path / "logit" / "logit.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["nop", "--form", "slow"], "--form 'slow' must be one of fast, no-null, causal, sweep"),
        (["nop", "--mitigation", "prayer"], "--mitigation 'prayer' must be one of none, gate"),
        (["registers", "--mitigation", "register"], "--mitigation 'register' does not exist for"),
        (["cross", "--seeds", "0"], "--seeds must be at least 1; got 0"),
        (["logit", "--out", "file"], "--out must name a folder that can be made; got 'file'"),
        (["nop", "--out", "file"], "--out must name a folder that can be made; got 'file'"),
    ],
)
def test_synthetic_refuses(tmp_path: Path, arguments: list[str], word: str) -> None:
    (tmp_path / "file").write_text("")
    done = sinkwise("synthetic", *arguments, cwd=tmp_path)
    assert done.returncode == 2 and word in done.stderr and "Traceback" not in done.stderr


def test_help_names_the_commands(tmp_path: Path) -> None:
    done = sinkwise("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "diagnose" in done.stdout
    assert "demo" in done.stdout
