"""Small models with sinks on disk, and what makes two scans the same to the last bit."""

import json
from pathlib import Path

import torch
from PIL import Image
from transformers import (
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    GPT2Config,
    GPT2LMHeadModel,
)

from tests import command
from tests.tokenizers import word_tokenizer

FRAMES = ("events", "heads", "layers")
WORDS = ["the", "sink", "draws", "attention", "from", "every", "query", "has", "nothing"]
COMMAND = [*command.COMMAND, "diagnose"]
ENVIRONMENT = command.ENVIRONMENT


def identical(one, other):
    """Frames equal to the last bit, in the same order, and meta as the same text."""
    for name in FRAMES:
        a, b = getattr(one, name), getattr(other, name)
        assert a.schema == b.schema and a.equals(b, null_equal=True), name
    assert json.dumps(one.meta) == json.dumps(other.meta)


def models(root):
    """A text model, a vision model, a text and five pictures, all in `root`."""
    torch.manual_seed(0)
    tokenizer = word_tokenizer(WORDS)
    text = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer),
            n_embd=24,
            n_layer=2,
            n_head=4,
            n_positions=64,
            bos_token_id=2,
            eos_token_id=3,
        )
    )
    text.transformer.wpe.weight.data[0] = torch.randn(24) * 50
    for block in text.transformer.h:
        fused = block.attn.c_attn
        drawn = block.ln_1(text.transformer.wpe.weight[0]) @ fused.weight[:, 24:48]
        fused.bias.data[:24] = drawn * 30 / drawn.norm() ** 2 * 4
    vision = Dinov2WithRegistersModel(
        Dinov2WithRegistersConfig(
            hidden_size=24, num_hidden_layers=2, num_attention_heads=3, image_size=84,
            patch_size=14, num_register_tokens=4,
        )
    )  # fmt: skip
    vision.embeddings.cls_token.data = torch.randn(1, 1, 24) * 50
    for block in vision.encoder.layer:
        inner = block.attention
        drawn = block.norm1(vision.embeddings.cls_token[0, 0]) @ inner.k_proj.weight.T
        inner.q_proj.bias.data = drawn * 30 / drawn.norm() ** 2 * 4
    text.save_pretrained(root / "text")
    vision.save_pretrained(root / "vision")
    tokenizer.save_pretrained(root / "text")
    (root / "vision" / "preprocessor_config.json").write_text(
        json.dumps({"size": {"height": 84, "width": 84}, "image_mean": [0.5] * 3})
    )
    (root / "book.txt").write_text(" ".join(WORDS * 99))
    pictures(root / "photos", 5)
    return root


def pictures(folder, number):
    """Pictures of random blocks."""
    folder.mkdir()
    random = torch.Generator().manual_seed(0)
    for index in range(number):
        blocks = torch.randint(0, 256, (5, 6, 3), generator=random, dtype=torch.uint8)
        Image.fromarray(blocks.numpy()).resize((96, 90), Image.Resampling.NEAREST).save(
            folder / f"{index}.png"
        )
    return folder


def sinkwise(*arguments: str | Path, cwd: Path, **environment: str):
    """Run `sinkwise diagnose` in a process of its own."""
    return command.sinkwise("diagnose", *arguments, cwd=cwd, **environment)
