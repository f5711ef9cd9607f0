"""What a sink cache costs: `python bench/stream.py` (one thread, ratios in one run).

For each cache length C, on a small Llama with random weights: a token by recomputing the C most
recent tokens; with transformers' own plain cache of C keys; with the sink cache; and with the two
classic designs of a sink cache, which rotate all keys by −1 at each step, or all keys at each read.
A second table compares the plain and the sink cache before the first eviction. A third times each
design's own update alone, for one layer in the shape of an 8B model. All numbers are medians of CPU
time; the forward calls are interleaved, so that all see the same machine.

`--flat 10000 100000` times a token after that many tokens of text.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import sinkwise
from sinkwise.attention.rotary import Rotary
from sinkwise.core.retention import Retention
from sinkwise.streaming.cache import SinkCache
from sinkwise.streaming.call import CacheCall
from sinkwise.streaming.layer import SinkLayer
from sinkwise.streaming.plan import Tokens
from sinkwise.streaming.positions.decoder import decoder_of
from sinkwise.streaming.rotation import SinkRotation

SINKS = 4
LENGTHS = (256, 512, 1024, 2048, 4096)


def model() -> Any:
    """Llama: 8 layers, 8 query and 4 key/value heads of 32, width 256."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=688, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=8192,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


class RotateAll(DynamicCache):
    """Classic: drop the oldest key of the window, rotate all others by −1 or at read, append."""

    def __init__(self, capacity: int, rotary: Rotary, at_read: bool) -> None:
        super().__init__()
        self.capacity, self.rotary, self.at_read = capacity, rotary, at_read
        self.stored: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        back = rotary.angles(torch.tensor(-1))
        self.minus_one = back.cos().float(), back.sin().float()
        positions = rotary.angles(torch.arange(capacity))
        self.positions = positions.cos().float(), positions.sin().float()

    def rotated(self, keys: torch.Tensor, by: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Every key, rotated."""
        return keys * by[0] + self.rotary.quarter(keys) * by[1]

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):  # type: ignore[no-untyped-def]
        """All keys and values, the new ones last."""
        if layer_idx not in self.stored:
            self.stored[layer_idx] = key_states, value_states
            return key_states, value_states
        keys, values = self.stored[layer_idx]
        if keys.shape[2] == self.capacity:
            keep = keys[:, :, SINKS + 1 :]
            if not self.at_read:
                keep = self.rotated(keep, self.minus_one)
            keys = torch.cat([keys[:, :, :SINKS], keep], dim=2)
            values = torch.cat([values[:, :, :SINKS], values[:, :, SINKS + 1 :]], dim=2)
        keys = torch.cat([keys, key_states], dim=2)
        values = torch.cat([values, value_states], dim=2)
        self.stored[layer_idx] = keys, values
        if self.at_read:
            by = tuple(part[: keys.shape[2]] for part in self.positions)
            return self.rotated(keys, by), values
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Keys before the call's own, one fewer when full."""
        have = self.stored[layer_idx][0].shape[2] if layer_idx in self.stored else 0
        return min(have, self.capacity - 1)

    def get_mask_sizes(self, query: Any, layer_idx: int = 0) -> tuple[int, int]:
        """All of them."""
        length = len(query) if isinstance(query, torch.Tensor) else query
        return self.get_seq_length(layer_idx) + length, 0


def ms(run: Callable[[], Any]) -> float:
    """Milliseconds of CPU time of this thread; other programs do not count."""
    started = time.thread_time()
    run()
    return 1000 * (time.thread_time() - started)


def interleaved(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median of each; every round runs all of them in turn."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(ms(run))
    return {name: median(values[1:]) for name, values in times.items()}


def forwards(llama: Any, length: int, rounds: int) -> dict[str, float]:
    """Milliseconds per token of each method, through transformers' own forward."""
    name = decoder_of(llama).cache_argument
    rotary = Rotary(llama.model.rotary_emb.inv_freq.double())  # a Llama's
    ids = torch.randint(0, 512, (1, length))
    token = ids[:, :1]
    caches: dict[str, Any] = {
        "sinks": SinkCache(llama, length - SINKS, SINKS),
        "plain": DynamicCache(),
        "rotate all by -1": RotateAll(length, rotary, at_read=False),
        "rotate at read": RotateAll(length, rotary, at_read=True),
    }
    for cache in caches.values():
        llama(ids, use_cache=True, **{name: cache})

    def step(which: str) -> None:
        cache = caches[which]
        if which == "plain":  # it holds `length` keys in every round, the new one included
            for layer in cache.layers:
                layer.keys, layer.values = (
                    part[:, :, : length - 1] for part in (layer.keys, layer.values)
                )
        llama(token, use_cache=True, **{name: cache})

    runs: dict[str, Callable[[], Any]] = {which: lambda w=which: step(w) for which in caches}
    out = interleaved(runs, rounds)
    few = max(3, min(9, 4096 // length))
    out["recompute"] = interleaved(
        {"r": lambda: llama(ids, use_cache=False, logits_to_keep=1)}, few
    )["r"]
    caches["sinks"].close()
    return out


def growing(llama: Any, length: int, rounds: int) -> dict[str, float]:
    """Milliseconds per token before the first eviction, after `length` tokens."""
    name = decoder_of(llama).cache_argument
    ids = torch.randint(0, 512, (1, length))
    caches = {"sinks": SinkCache(llama, 2 * length + rounds, SINKS), "plain": DynamicCache()}
    for cache in caches.values():
        llama(ids, use_cache=True, **{name: cache})
    out = interleaved(
        {
            which: lambda c=cache: llama(ids[:, :1], use_cache=True, **{name: c})
            for which, cache in caches.items()
        },
        rounds,
    )
    assert int(caches["sinks"].evicted) == 0
    caches["sinks"].close()
    return out


def updates(length: int, rounds: int) -> dict[str, float]:
    """Milliseconds of the cache's own update, one layer: 8 key/value heads of 128."""
    rotary = Rotary(1.0 / 10000 ** (torch.arange(0, 128, 2, dtype=torch.float64) / 128))
    keys, values = torch.randn(2, 1, 8, length, 128)
    key, value = keys[:, :, :1], values[:, :, :1]
    retention = Retention(SINKS, length - SINKS)
    layer = SinkLayer(retention, rotary, sliding=False)
    whole = CacheCall(Tokens((0,), length), retention, (0,))
    layer.update(keys, values, whole.plan(retention), None)
    # What a step does once for all layers, re-rotating the sinks, is not timed here.
    rotations = SinkRotation.of([layer])
    steps = iter(range(length, length + rounds))

    def step() -> float:
        seen = next(steps)
        for rotation in rotations:
            rotation.write(seen - length + 1)
        return ms(lambda: layer.step(key, value, *retention.step(seen)))

    times = [step() for _ in range(rounds)]
    out = {"sinks": median(times[1:])}
    runs: dict[str, Callable[[], Any]] = {}
    for name, at_read in (("rotate all by -1", False), ("rotate at read", True)):
        cache = RotateAll(length, rotary, at_read)
        cache.update(keys, values, 0)
        runs[name] = lambda c=cache: c.update(key, value, 0)
    # One after the other: the large copies of one would push the small reads of another out of
    # the processor's cache.
    return out | {name: interleaved({name: run}, rounds)[name] for name, run in runs.items()}


def flat(llama: Any, length: int, marks: tuple[int, ...]) -> None:
    """A token's time and the cache's size along an endless text, most of it fed in chunks."""
    name = decoder_of(llama).cache_argument
    cache = SinkCache(llama, length - SINKS, SINKS)
    token = torch.randint(0, 512, (1, 1))
    for mark in marks:
        while (left := mark - int(max(cache.seen.tolist() or [0]))) > 0:
            chunk = torch.randint(0, 512, (1, min(left, 4096)))
            llama.model(chunk, use_cache=True, **{name: cache})
        took = median(ms(lambda: llama(token, use_cache=True, **{name: cache})) for _ in range(100))
        size = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        print(f"| {mark:,} | {took:.2f} | {size / 2**20:.2f} |", flush=True)


@torch.no_grad()
def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument(
        "--model", help="another model for the first two tables, for example pypi:smollm2-135m"
    )
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS, help="cache lengths")
    parser.add_argument("--flat", type=int, nargs="*", help="numbers of tokens, for example 10000")
    given = parser.parse_args()
    torch.set_num_threads(1)
    llama = model() if given.model is None else sinkwise.load(given.model, dtype="float32")
    if given.flat:
        print("| tokens | ms per token | MiB of cache |\n|---|---|---|")
        return flat(llama, 256, tuple(given.flat))
    print("| cache length | recompute | plain cache | sinks | rotate all by −1 | rotate at read "
          "| recompute / sinks | sinks / plain | rotate all / sinks | at read / sinks |\n"
          "|---|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    for length in given.lengths:
        got = forwards(llama, length, given.rounds)
        sinks = got["sinks"]
        print(
            f"| {length:,} | {got['recompute']:.1f} | {got['plain']:.2f} | {sinks:.2f} "
            f"| {got['rotate all by -1']:.2f} | {got['rotate at read']:.2f} "
            f"| {got['recompute'] / sinks:.1f} | {sinks / got['plain']:.2f} "
            f"| {got['rotate all by -1'] / sinks:.2f} | {got['rotate at read'] / sinks:.2f} |",
            flush=True,
        )
    print("\n| tokens, none evicted | plain cache | sinks | sinks / plain |\n|---|---|---|---|")
    for length in (64, *given.lengths):
        got = growing(llama, length, given.rounds)
        print(f"| {length:,} | {got['plain']:.2f} | {got['sinks']:.2f} "
              f"| {got['sinks'] / got['plain']:.2f} |", flush=True)  # fmt: skip
    if given.model is not None:
        return
    print(
        "\n| keys | update, sinks | rotate all by −1 | rotate at read | ratios |\n"
        "|---|---|---|---|---|"
    )
    for length in (256, 1024, 4096, 16384):
        got = updates(length, given.rounds)
        sinks = got["sinks"]
        ratios = ", ".join(f"{got[n] / sinks:.0f}" for n in ("rotate all by -1", "rotate at read"))
        print(f"| {length:,} | {sinks:.3f} | {got['rotate all by -1']:.2f} "
              f"| {got['rotate at read']:.2f} | {ratios} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
