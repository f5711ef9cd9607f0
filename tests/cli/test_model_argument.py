"""Every command that takes MODEL takes what `sinkwise.load` takes, mitigated folders included."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import sinkwise as sw
from tests.command import sinkwise
from tests.tokenizers import word_tokenizer

WORDS = ["the", "sink", "draws", "attention", "from", "every", "query", "that", "says"]
STREAM = ("--text", "book.txt", "--cache-length", 16, "--tokens", 60, "--recompute-every", 9)
COMMANDS = {
    "diagnose": ("--text", "book.txt", "--length", 40, "--samples", 2),
    "mitigate": ("--sink-logits", "learnable"),
    "stream": STREAM,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    tokenizer = word_tokenizer(WORDS)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=24, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=3, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(root / "plain")
    tokenizer.save_pretrained(root / "plain")
    model = sw.load(root / "plain")
    sw.mitigate(model, sw.Gate("headwise")).save(root / "mitigated")
    (root / "book.txt").write_text(" ".join(WORDS * 20), encoding="utf-8")
    return root


@pytest.mark.parametrize("model", ["plain", "mitigated"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_takes_the_model(folder: Path, command: str, model: str) -> None:
    options = (*COMMANDS[command], "--out", f"{command}-{model}", "--json")
    done = sinkwise(command, model, *options, cwd=folder)
    if (command, model) == ("mitigate", "mitigated"):
        assert done.returncode == 2 and "already" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_refuses_what_load_refuses(folder: Path, command: str) -> None:
    done = sinkwise(command, "nowhere:nothing", *COMMANDS[command], "--out", "never", cwd=folder)
    assert done.returncode == 2
    with pytest.raises(sw.InputError) as error:
        sw.load("nowhere:nothing")
    assert done.stderr == f"sinkwise: {error.value}\n"
    assert not (folder / "never").exists()
