"""Find attention sinks in a ViT.

Scan a vision transformer on eight images, see which heads have a sink, and compare the default
event rule with a more permissive one. The default model is DINOv2-small from a PyPI package; any
`timm:`, `hf:` or `open_clip:` name works as well.
"""

import argparse
import random
import tempfile
from pathlib import Path

from PIL import Image, ImageDraw

import sinkwise as sw

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="pypi:dinov2-small-saliency")
parser.add_argument("--images", type=Path, help="a folder of images; default: eight drawings")
options = parser.parse_args()

# Without `--images` we draw some discs on a plain background. Use your own images for anything but
# a first look: which sinks a model has depends on what it sees.


def draw(folder: Path, count: int = 8, size: int = 224) -> Path:
    """A folder with `count` images of three discs each."""
    rng = random.Random(0)

    def color() -> tuple[int, ...]:
        return tuple(rng.randrange(256) for _ in range(3))

    for number in range(count):
        image = Image.new("RGB", (size, size), color())
        for _ in range(3):
            x, y, r = rng.randrange(size), rng.randrange(size), rng.randrange(15, 60)
            ImageDraw.Draw(image).ellipse((x - r, y - r, x + r, y + r), fill=color())
        image.save(folder / f"{number}.png")
    return folder


folder = options.images or draw(Path(tempfile.mkdtemp()))

# `sw.images` reads a folder and prepares each image as the model expects it (size, crop, mean and
# standard deviation). `sw.scan` runs the model once over all images and measures every attention
# call of every layer; nothing has to be changed in the model.

model = sw.load(options.model)
inputs = sw.images(folder, samples=8, batch_size=4)
scan = sw.scan(model, inputs)

# The `heads` frame has one row per layer and head. `sink_share` is the share of the images on which
# the head has a sink, `kind` and `token` say where it usually is, and `value_ratio` tells a NOP (up
# to 0.2) from a possible broadcast (0.5 or more).

COLUMNS = ["layer", "head", "sink_share", "kind", "token", "received", "value_ratio", "verdict"]
sinks = scan.heads.filter(scan.heads["verdict"] != "none")
print(f"{len(sinks)} of {len(scan.heads)} heads have a sink by the default rule:")
for row in sinks.select(COLUMNS).iter_rows(named=True):
    print(
        f"  layer {row['layer']:2}  head {row['head']}  {row['sink_share']:4.0%} of the images  "
        f"{row['kind']} {row['token']:3}  receives {row['received']:.2f}  "
        f"value ratio {row['value_ratio']:.2f}  {row['verdict']}"
    )

# For attention in both directions the default rule, `relaxed`, is strict: 90 % of the queries must
# give the token at least half of their attention. The rule `mean` asks for 0.3 of the attention on
# average, as is usual for language models.

verdict = sw.scan(model, inputs, rules="mean").verdict()
print("\nBy the rule `mean`:")
print(*(f"  {line}" for line in verdict.evidence), sep="\n")
print(f"Prescription: {verdict.prescription}. {verdict.advice}")
