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
ARGUMENTS = {"num_classes": 6, **({} if options.model else TINY)}


def build() -> nn.Module:
    """The model of an ordinary timm script."""
    torch.manual_seed(0)
    return timm.create_model(options.model or "vit_tiny_patch16_224", **ARGUMENTS)


# The task: grey noise with one colored square somewhere. Which of six colors is it?

COLORS = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [0, 1, 1], [1, 0, 1]]).float()


def batch(size: int, side: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images and labels."""
    labels = torch.randint(len(COLORS), (size,), generator=generator)
    corners = torch.randint(3, (size, 2), generator=generator) * (side // 3)
    images = 0.3 * torch.randn(size, 3, side, side, generator=generator)
    for image, label, (row, column) in zip(images, labels, corners.tolist(), strict=True):
        image[:, row : row + side // 3, column : column + side // 3] += COLORS[label, :, None, None]
    return images, labels


def train(model: nn.Module) -> float:
    """A plain training loop; returns the accuracy on fresh images."""
    side = model.patch_embed.img_size[0]
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
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

# For the second run, `sw.mitigate` is the one new line. It must come before the optimizer is made,
# so that the gates' parameters are trained as well. With the default `init="identity"` a gated
# model starts with exactly the same outputs as without, which also makes it safe to continue
# training a pretrained model; `init="paper"` starts as in the paper, for training from scratch.

gated = build()
parameters = sum(p.numel() for p in gated.parameters())
handle = sw.mitigate(gated, sw.Gate("headwise", init="paper"))
added = sum(p.numel() for p in gated.parameters()) - parameters
print(f"gated:  accuracy {train(gated):.2f}, {added:,} parameters more ({added / parameters:.2%})")

# How much do the gates let through? Each factor is between 0 (closed) and 1 (open; with
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
    low, high = factor.flatten(0, -2).amin(0).tolist(), factor.flatten(0, -2).amax(0).tolist()
    ranges = ", ".join(f"{a:.2f} to {b:.2f}" for a, b in zip(low, high, strict=True))
    print(f"  {name.partition('.attn')[0]}: gates of the heads, over all tokens: {ranges}")

# Does training with gates change the sinks? These models are small and their task is easy: the one
# sink that they grow is a broadcast, which a gate leaves alone.
# [Mitigations](../docs/mitigations.md) has models with NOP sinks, which a gate removes.

for name, model in (("plain", plain), ("gated", gated)):
    scan = sw.scan(model, [images], rules="mean")
    print(f"{name}:  {scan.verdict().evidence[0]}")

# A saved folder holds the weights, the gates and how the model was built: `timm_options` are the
# arguments of `timm.create_model`, which a timm model itself does not remember. `sw.load` and
# `sinkwise diagnose` read the folder.

folder = options.out or Path(tempfile.mkdtemp()) / "gated"
handle.save(folder, timm_options=ARGUMENTS)
print(f"saved; loaded again: {type(sw.load(folder)).__name__}")
