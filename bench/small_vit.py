"""A small ViT on real images: scikit-learn's 1,797 scanned digits of 8 x 8 pixels.

Two tasks on images of 24 x 24 pixels; every patch of 4 x 4 pixels has a target:

- `board`: nine digits in a 3 x 3 grid. Each is bright with a probability of 0.1, else dim. The
  patches of bright digits must tell which digits the board contains (3 times the mean of their
  one-hots); those of dim digits must answer zero. So nine in ten queries need no update.
- `canvas`: one digit at a random position in an empty image; every patch must tell which one.

The ViT is timm's with two blocks, narrow MLPs, no final norm, and no biases in its attention. With
wide MLPs, a final norm or biases an idle head's update can be undone or cancelled, so that a null
token is of little use (LOG.md records what was tried).
"""

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import sinkwise as sw
from sinkwise.mitigations.base import Mitigation
from sinkwise.storage.files import write_bytes
from sinkwise.synthetic.task import fit

SIDE, PATCH, DIGIT = 24, 4, 8
"""Side length in pixels of an image, a patch and a digit."""
CLASSES = 10
DIM_LIGHT = 0.5
"""Brightness of a dim digit."""
TARGET_SCALE = 3.0
"""The target of a bright patch is the mean of the one-hots times this."""
TRAIN_DIGITS = 1_400
"""Number of digits for training; the other 397 are held out."""
TEST_IMAGES = 256
TEST_SEED = 10_000

MITIGATIONS: dict[str, tuple[Mitigation, ...]] = {
    "none": (),
    "elementwise gate": (sw.Gate("elementwise", init="paper"),),
    "headwise gate": (sw.Gate("headwise", init="paper"),),
    "registers": (sw.Registers(4),),
    "one register": (sw.Registers(1),),
    "gate + registers": (sw.Gate("elementwise", init="paper"), sw.Registers(4)),
    "sink logit": (sw.SinkLogits(),),
    "softmax-one": (sw.SinkLogits("off-by-one"),),
    "global pathway": (),
}
"""The variants, as mitigations; the global pathway is `PathwayAttention` instead."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One ViT: its task, mitigation and training."""

    task: str
    """`board` or `canvas`."""
    mitigation: str = "none"
    """One of `MITIGATIONS`."""
    seed: int = 0
    """Seed of the weights and of the training images."""
    steps: int = 1_500
    """Training steps."""
    batch: int = 48
    """Images per step."""
    width: int = 64
    """Width of a token."""
    depth: int = 2
    """Number of blocks."""
    num_heads: int = 4
    """Heads per block."""
    mlp_ratio: float = 0.125
    """Width of the MLPs relative to `width`."""
    lr: float = 3e-3
    """Peak learning rate of AdamW, with 100 steps of warm-up and cosine decay to 0."""
    weight_decay: float = 0.05
    """Weight decay of AdamW."""
    bright_share: float = 0.1
    """Probability that a digit of the board is bright."""
    silence_weight: float = 10.0
    """Weight of the dim patches' squared error relative to that of the bright patches."""


RECIPES = {
    "board": Recipe(task="board"),
    "canvas": Recipe(task="canvas", steps=800),
}
"""The recipe of each task, without a mitigation."""


class ImageBatch(NamedTuple):
    """A batch of images with targets."""

    pixels: Tensor
    """batch 1 row column, 0 to 1."""
    targets: Tensor
    """Board: batch patch class. Canvas: batch, the digit."""
    ink: Tensor
    """batch patch: True where the patch is part of a digit."""
    silent: Tensor
    """batch patch: True where the target is zero."""


@cache
def digits() -> tuple[Tensor, Tensor]:
    """(images [1797 8 8] from 0 to 1, labels [1797]) in a fixed random order."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    pixels = torch.tensor(data.images, dtype=torch.float32) / 16
    return pixels[order], torch.tensor(data.target, dtype=torch.int64)[order]


def draw(recipe: Recipe, count: int, generator: torch.Generator, *, train: bool) -> ImageBatch:
    """`count` images for the recipe's task, with training or with held-out digits."""
    pixels, labels = digits()
    part = slice(None, TRAIN_DIGITS) if train else slice(TRAIN_DIGITS, None)
    pixels, labels = pixels[part], labels[part]
    tiles = SIDE // DIGIT
    if recipe.task == "board":
        chosen = torch.randint(len(labels), (count, tiles, tiles), generator=generator)
        bright = torch.rand(count, tiles, tiles, generator=generator) < recipe.bright_share
        light = torch.where(bright, 1.0, DIM_LIGHT)
        board = (pixels[chosen] * light[..., None, None]).transpose(2, 3)
        silent = _patches_of(~bright)
        answer = TARGET_SCALE * F.one_hot(labels[chosen], CLASSES).float().mean((1, 2))
        targets = answer[:, None] * ~silent[..., None]
        image = board.reshape(count, 1, SIDE, SIDE)
        return ImageBatch(image, targets, torch.ones_like(silent), silent)
    chosen = torch.randint(len(labels), (count,), generator=generator)
    image = torch.zeros(count, 1, SIDE, SIDE)
    corners = torch.randint((SIDE - DIGIT) // PATCH + 1, (2, count), generator=generator) * PATCH
    offsets = torch.arange(DIGIT)
    rows = (corners[0, :, None] + offsets)[:, :, None]
    columns = (corners[1, :, None] + offsets)[:, None, :]
    image[torch.arange(count)[:, None, None], 0, rows, columns] = pixels[chosen]
    ink = F.max_pool2d(image, PATCH).flatten(1) > 0
    return ImageBatch(image, labels[chosen], ink, torch.zeros_like(ink))


def _patches_of(tiles: Tensor) -> Tensor:
    """From (batch, row, column) of the digits to (batch, patch)."""
    times = DIGIT // PATCH
    return tiles.repeat_interleave(times, 1).repeat_interleave(times, 2).flatten(1)


class PathwayAttention(nn.Module):
    """attention(x) + pathway(x), with the signature of timm's attention."""

    def __init__(self, attention: nn.Module, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.attention = attention
        self.pathway = sw.GlobalPathway(width, generator=generator)
        self.update: Tensor | None = None
        """The attention's update in the last training step."""

    def forward(self, x: Tensor, attn_mask: None = None, is_causal: bool = False) -> Tensor:
        update = self.attention(x)
        self.update = update if self.training else None
        return update + self.pathway(x)


class PatchClassifier(nn.Module):
    """A ViT with a linear head on each patch."""

    def __init__(self, trunk: VisionTransformer) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(trunk.embed_dim, CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        """batch patch class."""
        return self.head(self.trunk.forward_features(pixels)[:, self.trunk.num_prefix_tokens :])


def penalty(model: nn.Module) -> Tensor | float:
    """The common-mode penalty on the attention updates next to global pathways; 0 without."""
    layers = [module for module in model.modules() if isinstance(module, PathwayAttention)]
    return sum(sw.common_mode_penalty(one.update) for one in layers if one.update is not None)


def build(recipe: Recipe) -> PatchClassifier:
    """The untrained model: all variants have the same initial weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        trunk = VisionTransformer(
            img_size=SIDE,
            patch_size=PATCH,
            in_chans=1,
            num_classes=0,
            embed_dim=recipe.width,
            depth=recipe.depth,
            num_heads=recipe.num_heads,
            mlp_ratio=recipe.mlp_ratio,
            qkv_bias=False,
            proj_bias=False,
            final_norm=False,
        )
        model = PatchClassifier(trunk)
    add_mitigation(trunk, recipe.mitigation, recipe.seed)
    return model


def add_mitigation(trunk: VisionTransformer, mitigation: str, seed: int) -> None:
    """Add one of `MITIGATIONS` to a timm ViT."""
    if MITIGATIONS[mitigation]:
        sw.mitigate(trunk, *MITIGATIONS[mitigation], seed=seed)
    elif mitigation == "global pathway":
        generator = torch.Generator().manual_seed(seed)
        for block in trunk.blocks:
            block.attn = PathwayAttention(block.attn, trunk.embed_dim, generator)


def loss(recipe: Recipe, model: PatchClassifier, images: ImageBatch) -> Tensor:
    """The training loss.

    Board: mean squared error of the bright patches plus a weighted one of the dim patches. Canvas:
    cross-entropy of every patch.
    """
    answers = model(images.pixels)
    if recipe.task == "board":
        error = (answers - images.targets).square().mean(-1)
        silent = images.silent
        bright_error = (error * ~silent).sum() / (~silent).sum().clamp(min=1)
        dim_error = (error * silent).sum() / silent.sum().clamp(min=1)
        return 3 * (bright_error + recipe.silence_weight * dim_error) + penalty(model)
    targets = images.targets[:, None].expand(answers.shape[:2])
    return F.cross_entropy(answers.flatten(0, 1), targets.flatten()) + penalty(model)


def test_images(recipe: Recipe) -> ImageBatch:
    """Images of held-out digits, the same for every mitigation."""
    generator = torch.Generator().manual_seed(TEST_SEED + recipe.seed)
    return draw(recipe, TEST_IMAGES, generator, train=False)


@torch.no_grad()
def quality(recipe: Recipe, model: PatchClassifier, images: ImageBatch) -> float:
    """Canvas: accuracy over all patches. Board: R² over the bright patches, 1 if perfect."""
    answers = model.eval()(images.pixels)
    if recipe.task == "canvas":
        return float((answers.argmax(-1) == images.targets[:, None]).double().mean())
    answers, targets = answers[~images.silent], images.targets[~images.silent]
    return 1 - float(
        (answers - targets).square().sum() / (targets - targets.mean(0)).square().sum()
    )


def load_or_train(recipe: Recipe, checkpoints: Path) -> PatchClassifier:
    """The trained model in eval mode; from the folder `checkpoints` if an earlier run saved it."""
    model = build(recipe)
    name = f"vit-{recipe.task}-{recipe.mitigation}-{recipe.seed}.safetensors".replace(" ", "-")
    facts = json.loads(
        json.dumps({**asdict(recipe), "torch": torch.__version__, "timm": timm.__version__})
    )
    if _load_checkpoint(checkpoints / name, model, facts):
        return model.eval()
    generator = torch.Generator().manual_seed(recipe.seed)
    fit(
        model.train(),
        lambda: loss(recipe, model, draw(recipe, recipe.batch, generator, train=True)),
        steps=recipe.steps,
        warmup_steps=min(100, recipe.steps),
        decay=True,
        lr=recipe.lr,
        betas=(0.9, 0.98),
        weight_decay=recipe.weight_decay,
    )
    tensors = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
    write_bytes(checkpoints / name, save(tensors, {"sinkwise": json.dumps(facts)}))
    return model.eval()


def _load_checkpoint(path: Path, model: nn.Module, facts: dict[str, Any]) -> bool:
    """Load the weights into `model` if the file exists and has the same facts; whether it did."""
    try:
        with safe_open(path, "pt") as file:
            if json.loads(file.metadata()["sinkwise"]) != facts:
                return False
            tensors = {key: file.get_tensor(key) for key in file.keys()}
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return False
    model.load_state_dict(tensors)
    return True
