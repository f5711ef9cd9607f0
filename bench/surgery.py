"""The cost of a mitigation: a training step of ViT-S/16 with it, relative to one without.

`OMP_NUM_THREADS=1 python bench/surgery.py` takes a minute on one CPU core. The variants take turns,
so that other load on the machine affects all of them; the ratio is the median over the rounds.
"""

import statistics
import time

import timm
import torch

import sinkwise as sw

BATCH, ROUNDS = 2, 9
VARIANTS = {
    "plain": (),
    "gate, headwise": (sw.Gate("headwise"),),
    "gate, elementwise": (sw.Gate("elementwise"),),
    "sink logits": (sw.SinkLogits(),),
    "4 registers": (sw.Registers(4),),
    "elementwise gate and 4 registers": (sw.Gate("elementwise"), sw.Registers(4)),
}


def step(model: torch.nn.Module, x: torch.Tensor) -> float:
    """Seconds of a forward and a backward pass."""
    start = time.perf_counter()
    model(x).square().mean().backward()
    model.zero_grad()
    return time.perf_counter() - start


def main() -> None:
    """Print one row per variant."""
    torch.manual_seed(0)
    x = torch.randn(BATCH, 3, 224, 224)
    models = {}
    for name, mitigations in VARIANTS.items():
        models[name] = timm.create_model("vit_small_patch16_224", pretrained=False)
        if mitigations:
            sw.mitigate(models[name], *mitigations)
    rounds = [{name: step(model, x) for name, model in models.items()} for _ in range(ROUNDS + 1)]
    rounds = rounds[1:]  # the first round warms up
    plain = sum(p.numel() for p in models["plain"].parameters())
    print("| mitigation | parameters | training step |\n|---|---|---|")
    for name, model in models.items():
        added = sum(p.numel() for p in model.parameters()) / plain - 1
        ratio = statistics.median(times[name] / times["plain"] for times in rounds)
        print(f"| {name} | +{added:.2%} | {ratio:.2f} x |", flush=True)


if __name__ == "__main__":
    main()
