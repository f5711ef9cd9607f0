"""What a scan costs: time and peak memory of plain forward, eager forward with attentions, scan.

    python bench/scan.py [--rounds 5] [--threads 1] [--write]

Ratios are medians over rounds of one run, in which the three take turns; peak memory is that above
the loaded model, each measured in a process of its own. `--write` puts the table into
bench/README.md. Random weights from config: nothing is downloaded.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIANTS = ("plain", "eager", "scan")
HERE = Path(__file__).parent


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


def run(variant: str, model: Any, batch: Any, batches: int) -> None:
    """Run one variant over `batches` equal batches."""
    import torch

    import sinkwise as sw
    from sinkwise.hosts.inputs import call

    if variant == "scan":
        sw.scan(model, [batch] * batches)
        return
    with torch.no_grad():
        for _ in range(batches):
            if variant == "plain":
                call(model, batch)
            else:
                model(batch, output_attentions=True)


def seconds(case: str, rounds: int, batches: int) -> dict[str, float]:
    """Median seconds a batch of each variant; a scan's one-off work is reported apart."""
    model, batch = CASES[case]()
    taken: dict[str, list[float]] = {name: [] for name in (*VARIANTS, "once")}
    for turn in range(rounds + 1):
        for variant in VARIANTS:
            model.set_attn_implementation("eager" if variant == "eager" else "sdpa")
            count = 1 if variant == "eager" else batches
            start = time.perf_counter()
            run(variant, model, batch, count)
            total = time.perf_counter() - start
            if variant == "scan":
                # Spectra, checks and output weights are paid once a scan, not once a batch.
                start = time.perf_counter()
                run(variant, model, batch, 1)
                single = time.perf_counter() - start
                if turn:
                    each = (total - single) / (batches - 1)
                    taken["scan"].append(each)
                    taken["once"].append(single - each)
            elif turn:
                taken[variant].append(total / count)
    return {name: statistics.median(values) for name, values in taken.items()}


def peak_mib(case: str, variant: str) -> float:
    """Peak memory above the loaded model, in a process of its own."""
    command = [sys.executable, __file__, "--memory", variant, "--case", case]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def measure_memory(case: str, variant: str) -> None:
    """Print the MiB by which the process's peak grows while a variant runs."""
    import sinkwise.scanning  # noqa: F401  imports are no part of the measurement

    model, batch = CASES[case]()
    model.set_attn_implementation("eager" if variant == "eager" else "sdpa")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    before = _status_kib("VmRSS")
    run(variant, model, batch, 2)
    print((_status_kib("VmHWM") - before) / 1024)


def _status_kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}: peak memory is measured on Linux only")


def main() -> None:
    """Measure every case and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--case", help="part of a case's name")
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help="put the table into bench/README.md")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    import torch

    torch.set_num_threads(options.threads)
    if options.memory:
        measure_memory(options.case, options.memory)
        return
    from sinkwise.versions import versions

    machine = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    lines = [
        f"Machine: {machine}, {options.threads} thread(s); "
        + ", ".join(f"{name} {version}" for name, version in versions().items()),
        "",
        "| case | plain, ms | eager + attentions | scan | once a scan, ms "
        "| plain, MiB | eager, MiB | scan, MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for case in CASES:
        if options.case and options.case not in case:
            continue
        time_of = seconds(case, options.rounds, options.batches)
        memory = {variant: peak_mib(case, variant) for variant in VARIANTS}
        plain = time_of["plain"]
        line = (
            f"| {case} | {plain * 1e3:.0f} | {time_of['eager'] / plain:.2f} x "
            f"| **{time_of['scan'] / plain:.2f} x** | {time_of['once'] * 1e3:.0f} "
            f"| {memory['plain']:.0f} | {memory['eager']:.0f} | {memory['scan']:.0f} |"
        )
        print(line, flush=True)
        lines.append(line)
    if options.write:
        readme = HERE / "README.md"
        head, _, tail = readme.read_text(encoding="utf-8").partition("<!-- scan -->\n")
        rest = tail.partition("<!-- /scan -->")[2]
        table = "\n".join(lines)
        readme.write_text(f"{head}<!-- scan -->\n{table}\n<!-- /scan -->{rest}", encoding="utf-8")


if __name__ == "__main__":
    main()
