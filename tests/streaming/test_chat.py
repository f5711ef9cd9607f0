"""The chat example, with scripted input."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ..tokenizers import word_tokenizer

ROOT = Path(__file__).parent.parent.parent
WORDS = ["the", "sink", "draws", "all", "attention", "say", "nothing", "bos", "eos", "user",
         "assistant", "helpful", "system"]  # fmt: skip
TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}bos system helpful eos{% endif %}"
    "{% for m in messages %} bos {{ m['role'] }} {{ m['content'] }} eos{% endfor %}"
    "{% if add_generation_prompt %} bos assistant {% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a chat template."""
    root = tmp_path_factory.mktemp("chat") / "model"
    tokenizer: Any = word_tokenizer(WORDS)
    tokenizer.eos_token, tokenizer.chat_template = "eos", TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=24, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=3, max_position_embeddings=32, pad_token_id=None, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(root)
    tokenizer.save_pretrained(root)
    return root


def chat(said: str, *options: Any) -> subprocess.CompletedProcess[str]:
    """Run the example."""
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / "04_endless_chat.py"), *map(str, options)],
        input=said, capture_output=True, text=True, timeout=300,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_a_conversation_longer_than_everything(folder: Path) -> None:
    said = "\n".join(["the sink draws", "say nothing", *["all attention"] * 6, "", "never read"])
    done = chat(said, folder, "--window-length", 11, "--num-sink-tokens", 2, "--max-new-tokens", 9)
    assert done.returncode == 0, done.stderr
    counts = [line for line in done.stdout.splitlines() if "so far" in line]
    assert len(counts) == 8 and counts[-1].endswith("13 in the cache]")
    assert int(counts[-1].split()[0][1:]) > 64
    again = chat(said, folder, "--window-length", 11, "--num-sink-tokens", 2,
                 "--max-new-tokens", 9)  # fmt: skip
    assert again.stdout == done.stdout


def test_greedy_and_the_end_of_the_input(folder: Path) -> None:
    done = chat("the sink", folder, "--temperature", 0, "--max-new-tokens", 3)
    assert done.returncode == 0 and "in the cache]" in done.stdout


def test_the_turns_are_the_templates(folder: Path) -> None:
    from transformers import AutoTokenizer

    turn = runpy.run_path(str(ROOT / "examples" / "04_endless_chat.py"))["turn"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [
        {"role": "user", "content": "the sink"},
        {"role": "assistant", "content": "draws all"},
        {"role": "user", "content": "say nothing"},
    ]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    answer = tokenizer("draws all", add_special_tokens=False)["input_ids"]
    first = turn(tokenizer, "the sink", True, False)
    expected = tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert first + answer + turn(tokenizer, "say nothing", False, False) == expected
    ended = [*answer, tokenizer.eos_token_id]
    assert first + ended + turn(tokenizer, "say nothing", False, True) == expected
    tokenizer.chat_template = None
    assert turn(tokenizer, "the sink", True, False) == tokenizer("the sink\n")["input_ids"]
