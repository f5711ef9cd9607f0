"""What received attention costs beside the attention kernel that it repeats.

    python bench/received.py [--rounds 7] [--threads 1] [--device cpu] [--write]

`tiles` and `flash` (the transposed kernel) get the kernel's log-sum-exp, as in a scan; `screen` is
the estimate from a sample of the queries. Medians of one run in which they take turns.
"""

import argparse
import os
import platform
import statistics
import time

from common import write_table

SHAPES = {
    "batch 4, 12 heads, 197 tokens": (4, 12, 12, 197, False),
    "batch 1, 12 heads, 1370 tokens": (1, 12, 12, 1370, False),
    "8 heads on 4, 4096 tokens, causal": (1, 8, 4, 4096, True),
}


def measure(
    shape: tuple[int, int, int, int, bool], rounds: int, device: str
) -> tuple[float, list[float]]:
    """Milliseconds of the kernel, and the ratios of tiles, flash and screen to it."""
    import torch

    from sinkwise.attention.received import received_mass, row_lse
    from sinkwise.attention.screen import Screen, screen
    from sinkwise.core.records import AttentionMask

    batch, heads, kv_heads, length, causal = shape
    q = torch.randn(batch, heads, length, 64, device=device)
    k, v = torch.randn(2, batch, kv_heads, length, 64, device=device)
    mask = AttentionMask(causal=causal)
    lse = row_lse(q, k, scale=0.125, mask=mask)
    given = {"scale": 0.125, "mask": mask, "lse": lse}
    sample = Screen().sample(length, causal)
    runs = {
        "kernel": lambda: torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=heads != kv_heads
        ),
        "tiles": lambda: received_mass(q, k, method="tiles", **given),
        "flash": lambda: received_mass(q, k, method="flash", **given),
        "screen": lambda: screen(q, k, lse, sample, scale=0.125, miss=1e-6),
    }
    taken: dict[str, list[float]] = {kind: [] for kind in runs}
    for turn in range(rounds + 1):
        for kind, run in runs.items():
            start = time.perf_counter()
            run()
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            if turn:
                taken[kind].append(time.perf_counter() - start)
    ratios = [
        statistics.median(a / b for a, b in zip(taken[kind], taken["kernel"], strict=True))
        for kind in ("tiles", "flash", "screen")
    ]
    return statistics.median(taken["kernel"]) * 1e3, ratios


def main() -> None:
    """Measure every shape and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", action="store_true", help="put the table into bench/README.md")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    import torch

    from sinkwise.storage.versions import versions

    torch.set_num_threads(options.threads)

    lines = [
        f"Machine: {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, "
        f"{options.device}, {options.threads} thread(s); torch {versions()['torch']}",
        "",
        "| shape, head_dim 64 | kernel, ms | tiles | flash | screen |",
        "|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for name, (batch, heads, kv_heads, length, causal) in SHAPES.items():
        shape = batch, heads, kv_heads, length, causal
        kernel, ratios = measure(shape, options.rounds, options.device)
        line = f"| {name} | {kernel:.1f} | " + " | ".join(f"{r:.2f} x" for r in ratios) + " |"
        print(line, flush=True)
        lines.append(line)
    if options.write:
        write_table("received", lines)


if __name__ == "__main__":
    main()
