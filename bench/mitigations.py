"""The cost of a mitigation in training: forward and backward pass relative to plain attention.

    python bench/mitigations.py [--rounds 7] [--threads 1] [--device cpu] [--write]

`attention` is the layer alone (projections, heads, W_O), `block` a pre-norm block with an MLP of
four times its width, `heads` the computation from q, k, v to the heads' outputs. The variants take
turns, every second round in reverse order, and ratios are medians over the rounds. On one CPU
thread they are ratios of process time, which other load on the machine disturbs less. Peak memory
is that of two steps on top of the loaded module, in a separate process for each variant.
"""

import argparse
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common import peak_growth_mib, write_table

DIM, HEADS = 768, 12


@dataclass(frozen=True)
class Shape:
    """The shape of a batch of tokens."""

    batch: int
    tokens: int
    is_causal: bool


SHAPES = {
    "ViT-B, batch 8, 197 tokens": Shape(8, 197, False),
    "768 wide, batch 2, 1024 tokens, causal": Shape(2, 1024, True),
}
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "elementwise gate": {"gate": "elementwise"},
    "headwise gate": {"gate": "headwise"},
    "4 registers": {},
    "sink logit": {"softmax": "learnable"},
    "gate + registers": {"gate": "elementwise"},
    "global pathway": {},
}
"""Variants of a layer or block, and the options of their attention."""

KERNELS = ("plain", "rescale", "column", "eager")
"""SDPA without a sink logit, the two forms with one, and one that computes the whole map."""


def layer_step(variant: str, shape: Shape, with_mlp: bool, device: str) -> Callable[[], None]:
    """One training step of a layer, or of a block, on noise."""
    import torch
    from torch import nn

    from sinkwise.nn.attention import GatedAttention
    from sinkwise.nn.global_pathway import GlobalPathway, common_mode_penalty
    from sinkwise.nn.registers import RegisterTokens

    torch.manual_seed(0)
    options = {"gate": None, "is_causal": shape.is_causal, **LAYERS[variant]}
    attention = GatedAttention(DIM, HEADS, qkv_bias=True, out_bias=True, **options)
    registers = RegisterTokens(4, DIM) if "registers" in variant else None
    pathway = GlobalPathway(DIM) if variant == "global pathway" else None
    norms = nn.ModuleList([nn.LayerNorm(DIM), nn.LayerNorm(DIM)])
    mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
    parts = [attention, registers, pathway, *((norms, mlp) if with_mlp else ())]
    module = nn.ModuleList([part for part in parts if part is not None]).to(device)
    x = torch.randn(shape.batch, shape.tokens, DIM, device=device, requires_grad=True)
    target = torch.randn_like(x)

    def step() -> None:
        module.zero_grad(set_to_none=True)
        x.grad = None
        state = x if registers is None else registers(x)
        normed = norms[0](state) if with_mlp else state
        update = attention(normed)
        penalty = 0.0 if pathway is None else common_mode_penalty(update)
        if pathway is not None:
            update = update + pathway(normed)
        if with_mlp:
            state = state + update
            update = state + mlp(norms[1](state))
        out = update if registers is None else registers.drop(update)
        ((out * target).sum() + penalty).backward()

    return step


def kernel_step(variant: str, shape: Shape, device: str) -> Callable[[], None]:
    """Forward and backward pass from q, k, v and one logit per head to the heads' outputs."""
    import torch
    import torch.nn.functional as F

    from sinkwise.nn.sink_logit import sink_attention
    from sinkwise.nn.softmax import softmax

    size, width = (shape.batch, shape.tokens, HEADS), DIM // HEADS
    q, k, v = (torch.randn(*size, width, device=device).transpose(1, 2) for _ in range(3))
    sink = torch.zeros(HEADS, device=device)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v, sink)]
    grad = torch.randn(*size, width, device=device).transpose(1, 2)

    def heads() -> Any:
        if variant == "plain":
            return F.scaled_dot_product_attention(q, k, v, is_causal=shape.is_causal)
        if variant != "eager":
            return sink_attention(q, k, v, sink, is_causal=shape.is_causal, form=variant)
        scores = q @ k.mT * width**-0.5
        if shape.is_causal:
            masked = torch.ones(scores.shape[-2:], dtype=torch.bool, device=device).triu(1)
            scores = scores.masked_fill(masked, -math.inf)
        return softmax(scores, "learnable", sink) @ v

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        heads().backward(grad)

    return step


def step_of(level: str, variant: str, shape: Shape, device: str) -> Callable[[], None]:
    """One step of a variant at a level."""
    if level == "heads":
        return kernel_step(variant, shape, device)
    return layer_step(variant, shape, level == "block", device)


def variants_of(level: str, shape: Shape) -> list[str]:
    """The variants of a level. The global pathway uses later tokens: it has no causal form."""
    if level == "heads":
        return list(KERNELS)
    return [name for name in LAYERS if name != "global pathway" or not shape.is_causal]


def timings(level: str, shape: Shape, options: argparse.Namespace) -> dict[str, float]:
    """Median seconds of the plain step, and the others' median ratios to it in the same round."""
    import torch

    rounds, device = options.rounds, options.device
    single_thread = device == "cpu" and options.threads == 1
    clock = time.process_time if single_thread else time.perf_counter
    names = variants_of(level, shape)
    steps = {name: step_of(level, name, shape, device) for name in names}
    taken: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for name in names if turn % 2 else reversed(names):
            start = clock()
            steps[name]()
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            if turn:  # the first round warms up
                taken[name].append(clock() - start)
    plain = taken["plain"]
    return {
        name: statistics.median(
            one if name == "plain" else one / other
            for one, other in zip(values, plain, strict=True)
        )
        for name, values in taken.items()
    }


def peak_mib(level: str, variant: str, shape: str, options: argparse.Namespace) -> float:
    """Peak memory of two steps on top of the loaded module, in a separate process."""
    command = [sys.executable, __file__, "--memory", level, variant, shape]
    command += ["--device", options.device, "--threads", str(options.threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def measure_memory(level: str, variant: str, shape: str, device: str) -> None:
    """Print the peak of two steps, after a small one that triggers torch's lazy initialisation."""
    step_of(level, variant, Shape(1, 8, SHAPES[shape].is_causal), device)()
    step = step_of(level, variant, SHAPES[shape], device)

    def two() -> None:
        step()
        step()

    print(peak_growth_mib(two, device))


def table(level: str, options: argparse.Namespace) -> list[str]:
    """The lines of one level's table."""
    names = list(KERNELS if level == "heads" else LAYERS)
    head = f"| {level} | plain, ms | {' | '.join(names[1:])} | MiB: {' | '.join(names)} |"
    lines = [head, "|---" * (2 * len(names) + 1) + "|"]
    print("\n".join(lines), flush=True)
    for title, shape in SHAPES.items():
        found = timings(level, shape, options)
        peaks = {name: peak_mib(level, name, title, options) for name in found}
        cells = [f"{found['plain'] * 1e3:.0f}"]
        cells += [f"{found[name]:.2f} x" if name in found else "-" for name in names[1:]]
        cells += [f"{peaks[name]:.0f}" if name in peaks else "-" for name in names]
        lines.append(f"| {title} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Measure every level and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--levels", default="attention,block,heads")
    parser.add_argument("--memory", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help="update bench/README.md")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    import torch

    torch.set_num_threads(options.threads)
    if options.memory:
        measure_memory(*options.memory, options.device)
        return
    from sinkwise.storage.versions import versions

    lines = [
        f"Machine: {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, "
        f"{options.device}, {options.threads} thread(s); torch {versions()['torch']}"
    ]
    print(lines[0], flush=True)
    for level in options.levels.split(","):
        lines += ["", *table(level, options)]
    if options.write:
        write_table("mitigations", lines)


if __name__ == "__main__":
    main()
