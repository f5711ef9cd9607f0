"""What a scan costs: time and peak memory beside the plain forward and the usual ways.

    python bench/scan.py [--rounds 5] [--threads 1] [--device cpu] [--write]

`eager` keeps the attentions that transformers returns, `caching` keeps q, k, v and the map of every
layer, `scan` measures everything, `screen` is a screened scan. Ratios are medians over the rounds
of one run, in which they take turns; peak memory is that above the loaded model, the median of
three processes of its own, whose allocator keeps nothing that is freed (on a GPU: of torch's
allocator). `--write` puts the table into bench/README.md. Random weights from config: nothing is
downloaded.
"""

import argparse
import functools
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from common import peak_growth_mib, write_table

VARIANTS = ("plain", "eager", "caching", "scan", "screen")


def vit(size: int, patch: int, batch: int) -> tuple[Any, Any]:
    """A ViT-B of transformers and one batch of noise."""
    import torch
    from transformers import ViTConfig, ViTModel

    model = ViTModel(ViTConfig(image_size=size, patch_size=patch), add_pooling_layer=False).eval()
    return model, torch.randn(batch, 3, size, size)


def causal(tokens: int) -> tuple[Any, Any]:
    """A Llama-like model (8 layers, 512 wide, 8 heads on 4 key/value heads) and random tokens."""
    import torch
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=32000,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaModel(config).eval(), torch.randint(0, 32000, (1, tokens))


CASES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "ViT-B/16, 224 px, batch 8": lambda: vit(224, 16, 8),
    "ViT-B/14, 518 px, batch 1": lambda: vit(518, 14, 1),
    "Llama-like, 2048 tokens": lambda: causal(2048),
    "Llama-like, 4096 tokens": lambda: causal(4096),
}
"""What is measured."""

TRIMMED = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "0",
}
"""glibc's allocator gives freed tensors back at once. As it comes it keeps holes in its heap, 30 to
70 MiB of them and others in every run, and those would be measured.
"""


def run(variant: str, model: Any, batch: Any, batches: int) -> None:
    """Run one variant over `batches` equal batches."""
    import torch

    import sinkwise as sw
    from sinkwise.hosts.inputs import call

    if variant in ("scan", "screen"):
        sw.scan(model, [batch] * batches, screen=variant == "screen")
        return
    with torch.no_grad():
        for _ in range(batches):
            if variant == "plain":
                call(model, batch)
            elif variant == "eager":
                model(batch, output_attentions=True)
            else:
                kept: list[Any] = []
                with sw.capture(model, lambda record, kept=kept: kept.append(_cached(record))):
                    call(model, batch)


def _cached(record: Any) -> tuple[Any, ...]:
    """What tools that cache everything keep of an attention call."""
    from sinkwise.attention.reference import attention

    options = {"scale": record.scale, "mask": record.mask, "softcap": record.softcap}
    return record.q, record.k, record.v, attention(record.q, record.k, record.v, **options).weights


def timings(case: str, options: argparse.Namespace) -> dict[str, float]:
    """Median seconds a batch of the plain forward and of a scan's one-off work; median ratios of
    the others to the plain forward of their own round.
    """
    device, batches = options.device, options.batches
    model, batch = _on(device, *CASES[case]())

    def clock(variant: str, count: int) -> float:
        start = time.perf_counter()
        run(variant, model, batch, count)
        _wait(device)
        return time.perf_counter() - start

    taken: dict[str, list[float]] = {name: [] for name in (*VARIANTS, "once")}
    for turn in range(options.rounds + 1):
        plain = None
        for variant in options.variants.split(","):
            model.set_attn_implementation("eager" if variant == "eager" else "sdpa")
            if variant in ("eager", "caching"):
                each = clock(variant, 1)
            elif variant == "plain":
                each = plain = clock(variant, batches) / batches
            else:
                # Spectra, checks and output weights are paid once a scan, not once a batch.
                single = clock(variant, 1)
                each = (clock(variant, batches + 1) - single) / batches
                if variant == "scan" and turn:
                    taken["once"].append(single - each)
            if turn and plain is not None:  # the first turn warms up
                taken[variant].append(each if variant == "plain" else each / plain)
    return {name: statistics.median(values or [math.nan]) for name, values in taken.items()}


def _on(device: str, model: Any, batch: Any) -> tuple[Any, Any]:
    return model.to(device), batch.to(device)


def _wait(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize()


def peak_mib(case: str, variant: str, options: argparse.Namespace) -> float:
    """Peak memory above the loaded model: the median of three processes of its own."""
    command = [sys.executable, __file__, "--memory", variant, "--case", case]
    command += ["--device", options.device, "--threads", str(options.threads)]
    start = functools.partial(subprocess.run, capture_output=True, text=True, check=True)
    peaks = [start(command, env={**os.environ, **TRIMMED}).stdout.split()[-1] for _ in range(3)]
    return statistics.median(map(float, peaks))


def measure_memory(case: str, variant: str, device: str) -> None:
    """Print the MiB by which the process's peak grows while a variant runs."""
    import sinkwise.scanning.scan  # noqa: F401  imports are no part of the measurement

    model, batch = _on(device, *CASES[case]())
    model.set_attn_implementation("eager" if variant == "eager" else "sdpa")
    print(peak_growth_mib(lambda: run(variant, model, batch, 2), device))


def main() -> None:
    """Measure every case and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="plain must be among them")
    parser.add_argument("--case", help="part of a case's name")
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help="put the table into bench/README.md")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    import torch

    torch.set_num_threads(options.threads)
    if options.memory:
        measure_memory(options.case, options.memory, options.device)
        return
    from sinkwise.storage.versions import versions

    machine = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    lines = [
        f"Machine: {machine}, {options.threads} thread(s); "
        + ", ".join(f"{name} {version}" for name, version in versions().items()),
        "",
        "| case | plain, ms | eager | caching | scan | screen | once a scan, ms "
        "| MiB: plain | eager | caching | scan | screen |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for case in CASES:
        if options.case and options.case not in case:
            continue
        found = timings(case, options)
        ratios = " | ".join(f"{found[name]:.2f} x" for name in VARIANTS[1:])
        chosen = options.variants.split(",")
        peaks = [peak_mib(case, name, options) if name in chosen else math.nan for name in VARIANTS]
        memory = " | ".join(f"{peak:.0f}" for peak in peaks)
        line = (
            f"| {case} | {found['plain'] * 1e3:.0f} | {ratios} | {found['once'] * 1e3:.0f} "
            f"| {memory} |"
        )
        print(line, flush=True)
        lines.append(line)
    if options.write:
        write_table("scan", lines)


if __name__ == "__main__":
    main()
