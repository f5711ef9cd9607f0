"""Four million tokens through one sink cache: `python bench/soak.py > docs/soak.log`.

A small Llama (2 layers, width 64) with 4 + 252 keys. After each number of tokens in `--marks`:

- milliseconds per token (CPU time of this thread, median of 200 single steps),
- bytes in the cache and the resident memory of the process,
- the largest difference of the last logits to those of a fresh float64 cache that is fed only the
  sinks and the last thousand tokens, all that they depend on.
"""

import argparse
import copy
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sinkwise.streaming.cache import SinkCache
from sinkwise.streaming.positions.decoder import decoder_of

SINKS, WINDOW, TAIL = 4, 252, 1000
STEPS = 200


def tokens(start: int, count: int) -> torch.Tensor:
    """Part of an endless pseudo-random text, a function of the position alone."""
    at = torch.arange(start, start + count)
    return ((at * 2654435761 + (at * at) % 8191) >> 7).remainder(507)[None] + 5


def resident() -> float:
    """Resident memory of the process, in MiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


@torch.no_grad()
def main() -> None:
    """Print one line per mark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--marks", type=int, nargs="+",
                        default=[10**4, 10**5, 10**6, 2 * 10**6, 3 * 10**6, 4 * 10**6])  # fmt: skip
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).eval().to(getattr(torch, given.dtype))
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.mul_(3.0)  # attention far from uniform
    exact = copy.deepcopy(model).double()
    name = decoder_of(model).cache_argument
    cache = SinkCache(model, WINDOW, SINKS)
    print(f"{given.dtype}, cache {SINKS} + {WINDOW}, torch {torch.__version__}")
    print("| tokens | ms per token | bytes in cache | resident MiB | error of logits | hours |")
    print("|---|---|---|---|---|---|", flush=True)
    at, began = 0, time.perf_counter()
    for mark in given.marks:
        while at < mark - STEPS:
            size = min(4096, mark - STEPS - at)
            model.model(tokens(at, size), use_cache=True, **{name: cache})
            at += size
        times = []
        for _ in range(STEPS):
            started = time.thread_time()
            logits = model(tokens(at, 1), use_cache=True, **{name: cache}).logits[0, -1]
            times.append(time.thread_time() - started)
            at += 1
        with SinkCache(exact, WINDOW, SINKS) as fresh:
            again = torch.cat([tokens(0, SINKS), tokens(mark - TAIL, TAIL)], dim=1)
            want = exact(again, use_cache=True, **{name: fresh}).logits[0, -1]
        assert cache.seen.item() == mark == cache.kept.item() + cache.evicted.item()
        size = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        off = float((logits.double() - want).abs().max())
        hours = (time.perf_counter() - began) / 3600
        print(
            f"| {mark:,} | {1000 * median(times):.2f} | {size:,} | {resident():.0f} "
            f"| {off:.1e} (standard deviation of logits {float(want.std()):.2f}) | {hours:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
