"""Add gates to your timm training script.

One line inserts a sigmoid gate before every output projection; your training loop stays as it is.
Here a small ViT is trained twice on generated images, without and with gates, and both are scanned.
With `--model vit_small_patch16_224` it is a real one; replace `batch` by your data loader.
"""

import argparse
import tempfile
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sinkwise as sw

parser = argparse.ArgumentParser()
parser.add_argument("--model", help="a timm name; default: a ViT with two blocks")
parser.add_argument("--steps", type=int, default=150)
parser.add_argument("--out", type=Path, help="where to save the gated model")
options = parser.parse_args()

TINY = {"img_size": 24, "patch_size": 4, "embed_dim": 48, "depth": 2, "num_heads": 4}
ARGUMENTS = {"num_classes": 9, **({} if options.model else TINY)}


def build() -> nn.Module:
    """The model of an ordinary timm script."""
    torch.manual_seed(0)
    return timm.create_model(options.model or "vit_tiny_patch16_224", **ARGUMENTS)


# The task: noise, and one bright patch of the size of a ninth of the image. Which ninth is it?


def batch(size: int, side: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images and labels."""
    labels = torch.randint(9, (size,), generator=generator)
    images = 0.3 * torch.randn(size, 3, side, side, generator=generator)
    cell = side // 3
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = divmod(label, 3)
        image[:, row * cell : (row + 1) * cell, column * cell : (column + 1) * cell] += 1.0
    return images, labels


def train(model: nn.Module) -> float:
    """A plain training loop; returns the accuracy on fresh images."""
    side = model.patch_embed.img_size[0]
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(options.steps):
        images, labels = batch(32, side, generator)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    images, labels = batch(256, side, torch.Generator().manual_seed(2))
    with torch.no_grad():
        return float((model.eval()(images).argmax(-1) == labels).float().mean())


# The first run is without gates.

plain = build()
print(f"plain:  accuracy {train(plain):.2f}")

# For the second run, `sw.mitigate` is the one new line. It must come before the optimizer is made, so
# that the gates' parameters are trained as well. With the default `init="identity"` a gated model
# starts with exactly the same outputs as without, which also makes it safe to continue training a
# pretrained model; `init="paper"` starts as in the paper, for training from scratch.

gated = build()
parameters = sum(p.numel() for p in gated.parameters())
handle = sw.mitigate(gated, sw.Gate("headwise", init="paper"))
added = sum(p.numel() for p in gated.parameters()) - parameters
print(f"gated:  accuracy {train(gated):.2f}, {added:,} parameters more ({added / parameters:.2%})")

# How much do the gates let through? Each factor lies between 0 (closed) and 1 (open; with
# `init="identity"`, 2). `sw.capture` is not needed: a gate is an ordinary submodule.

images, _ = batch(64, gated.patch_embed.img_size[0], torch.Generator().manual_seed(3))
factors: dict[str, Tensor] = {}
hooks = [
    module.register_forward_hook(
        lambda _module, _args, out, name=name: factors.update({name: torch.sigmoid(out)})
    )
    for name, module in gated.named_modules()
    if name.endswith("output_gate.proj")
]
with torch.no_grad():
    gated(images)
for hook in hooks:
    hook.remove()
for name, factor in factors.items():
    per_head = ", ".join(f"{value:.2f}" for value in factor.flatten(0, -2).mean(0).tolist())
    print(f"  {name.partition('.attn')[0]}: mean gate per head {per_head}")

# Does training with gates change the sinks? Here both models are small and the task is easy, so
# neither may have any; docs/mitigations.md has models in which a gate removes all NOP sinks.

for name, model in (("plain", plain), ("gated", gated)):
    scan = sw.scan(model, [images], rules="mean")
    print(f"{name}:  {scan.verdict().evidence[0]}")

# A saved folder holds the weights, the gates and how the model was built: `timm_options` are the
# arguments of `timm.create_model`, which a timm model itself does not remember. `sw.load` and
# `sinkwise diagnose` read the folder.

folder = options.out or Path(tempfile.mkdtemp()) / "gated"
handle.save(folder, timm_options=ARGUMENTS)
print(f"saved; loaded again: {type(sw.load(folder)).__name__}")
