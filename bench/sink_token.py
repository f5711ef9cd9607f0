"""How many sinks a cache needs, with and without a learned sink token.

    python bench/sink_token.py emma.txt --out sink-token          # bench/austen.py makes the text

Two byte-level Llamas with the same seed are trained on the first nine tenths of a text, one of them
with `nn.sink_token.SinkToken` before every sample. Both are then evaluated on the last tenth with
sink caches of the same length and 0, 1, 2, 4 and 8 sinks; the learned token is the first sink. The
table has the perplexity per byte once the cache is full, and how far it is above that of the same
model with the most sinks, with the standard error over paired bytes. The trained models are saved
in the folder and used again.

Reference: Xiao et al., 2023, arXiv 2309.17453, section 3.3 and table 3 (160 M parameters, 1,024).
"""

import argparse
from math import exp, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import sinkwise as sw
from sinkwise.nn.sink_token import SinkToken
from sinkwise.storage.files import write_bytes
from sinkwise.streaming.positions.decoder import decoder_of

LENGTH = 128
"""Bytes per sample, and keys per cache."""
BATCH = 32
SINKS = (0, 1, 2, 4, 8)
EVALUATED = 8192
"""Bytes that every cache is evaluated on."""


class Bytes(nn.Module):
    """A byte-level Llama, with or without a learned sink token before every sample."""

    def __init__(self, learned: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=256, hidden_size=128, intermediate_size=344, num_hidden_layers=4,
            num_attention_heads=4, max_position_embeddings=4 * LENGTH, pad_token_id=None,
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        self.llama: Any = LlamaForCausalLM(config)
        self.token = SinkToken(config.hidden_size) if learned else None

    def loss(self, ids: Tensor) -> Tensor:
        """Mean −ln p of the bytes in a batch."""
        embeds = self.llama.get_input_embeddings()(ids)
        wanted = ids[:, 1:]
        if self.token is not None:
            embeds, wanted = self.token(embeds), ids
        logits = self.llama(inputs_embeds=embeds, use_cache=False).logits[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())

    @torch.no_grad()
    def evaluate(self, ids: list[int], sinks: int) -> list[float]:
        """−ln p of every byte after the cache, with that many sinks, is full."""
        with sw.SinkCache(self.llama, LENGTH - sinks, sinks) as cache:
            if self.token is not None:
                vector = self.token.vector[None, None]
                name = decoder_of(self.llama).cache_argument
                self.llama.model(inputs_embeds=vector, use_cache=True, **{name: cache})
            scores = [-one.log_probability for one in sw.stream(self.llama, ids, cache=cache)]
        return scores[LENGTH:]


def trained(learned: bool, data: Tensor, steps: int, out: Path) -> Bytes:
    """The trained model, loaded from the folder if it was saved there."""
    model = Bytes(learned)
    path = out / f"{'learned' if learned else 'plain'}-{steps}.safetensors"
    if path.exists():
        model.load_state_dict(load_file(path))
        return model.eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    generator = torch.Generator().manual_seed(1)
    bar = tqdm(range(steps), desc=path.stem, mininterval=5)
    for _ in bar:
        starts = torch.randint(len(data) - LENGTH, (BATCH,), generator=generator)
        loss = model.loss(data[starts[:, None] + torch.arange(LENGTH)])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{loss.detach():.3f}", refresh=False)
    out.mkdir(parents=True, exist_ok=True)
    write_bytes(path, save({name: part.contiguous() for name, part in model.state_dict().items()}))
    return model.eval()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path("sink-token"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    data = torch.frombuffer(bytearray(given.text.read_bytes()), dtype=torch.uint8).long()
    split = len(data) * 9 // 10
    print("| model | sinks + window | perplexity per byte | above 8 sinks |\n|---|---|---|---|")
    for learned in (False, True):
        model = trained(learned, data[:split], given.steps, given.out)
        found = {
            sinks: model.evaluate(data[split : split + EVALUATED].tolist(), sinks)
            for sinks in SINKS
        }
        best = found[SINKS[-1]]
        for sinks, losses in found.items():
            apart = [loss - other for loss, other in zip(losses, best, strict=True)]
            error = 100 * stdev(apart) / sqrt(len(apart))
            print(
                f"| {'learned sink token' if learned else 'plain'} | {sinks} + {LENGTH - sinks} "
                f"| {exp(fmean(losses)):.3f} "
                f"| {100 * (exp(fmean(apart)) - 1):+.2f} ± {error:.2f} % |",
                flush=True,
            )


if __name__ == "__main__":
    main()
