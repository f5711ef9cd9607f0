"""A small ViT on real pictures: scikit-learn's 1,797 scanned digits, 8 x 8 pixels each.

Two tasks, both answered at every patch of a 24 x 24 picture cut into patches of 4 x 4:

- `board`: nine digits in a 3 x 3 grid, of which one in ten at random is bright, the others dim. A
  patch of a bright digit must tell which digits the board holds (3 times the mean of their
  one-hots); a patch of a dim one must answer zero. So nine queries in ten have nothing to do.
- `canvas`: one digit at a random place of an empty picture; every patch must tell which one.

The ViT is timm's with two blocks, narrow MLPs, no final norm, and no biases in its attention. Wide
MLPs, a final norm and biases each take away what makes a null token worth having: they undo, or
cancel, what an idle head writes (LOG.md has what was tried).
"""

import json
from collections.abc import Callable
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
"""Pixels of a picture's side, of a patch's and of a digit's."""
CLASSES = 10
DIM_LIGHT = 0.5
"""Brightness of a dim digit."""
SHARE = 3.0
"""What a bright patch must answer is the mean of the one-hots times this."""
TRAINED_ON = 1_400
"""Digits that training draws from; the other 397 are for testing."""
TEST_PICTURES = 256
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
"""The variants, and what `sinkwise.mitigate` puts in; the last is a module around the attention."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One ViT: its task, what is put in, and how it is trained."""

    task: str
    """`board` or `canvas`."""
    mitigation: str = "none"
    """One of `MITIGATIONS`."""
    seed: int = 0
    """Seed of the weights and of the training pictures."""
    steps: int = 1_500
    """Training steps."""
    batch: int = 48
    """Pictures of a step."""
    width: int = 64
    """Channels of a token."""
    depth: int = 2
    """Blocks."""
    num_heads: int = 4
    """Heads of a block."""
    mlp_ratio: float = 0.125
    """Width of the MLPs in units of `width`."""
    lr: float = 3e-3
    """Highest learning rate of AdamW, after 100 steps of warm-up; then along a cosine to 0."""
    weight_decay: float = 0.05
    """Weight decay of AdamW."""
    bright_share: float = 0.1
    """Probability that a digit of the board is bright."""
    silence_weight: float = 10.0
    """Weight of the dim patches' mean squared answer beside the bright patches' error."""


RECIPES = {
    "board": Recipe(task="board"),
    "canvas": Recipe(task="canvas", steps=800),
}
"""What is trained, with each mitigation."""


class Pictures(NamedTuple):
    """A batch."""

    pixels: Tensor
    """batch 1 row column, 0 to 1."""
    targets: Tensor
    """Board: batch patch class, the answers. Canvas: batch, the digit."""
    ink: Tensor
    """batch patch: part of a digit."""
    silent: Tensor
    """batch patch: must answer zero."""


@cache
def digits() -> tuple[Tensor, Tensor]:
    """(pictures [1797 8 8] from 0 to 1, digits [1797]) in a fixed random order."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    pixels = torch.tensor(found.images, dtype=torch.float32) / 16
    return pixels[order], torch.tensor(found.target, dtype=torch.int64)[order]


def draw(recipe: Recipe, count: int, generator: torch.Generator, *, train: bool) -> Pictures:
    """`count` pictures of the recipe's task, of training digits or of those held out."""
    pixels, labels = digits()
    part = slice(None, TRAINED_ON) if train else slice(TRAINED_ON, None)
    pixels, labels = pixels[part], labels[part]
    tiles = SIDE // DIGIT
    if recipe.task == "board":
        chosen = torch.randint(len(labels), (count, tiles, tiles), generator=generator)
        bright = torch.rand(count, tiles, tiles, generator=generator) < recipe.bright_share
        light = torch.where(bright, 1.0, DIM_LIGHT)
        board = (pixels[chosen] * light[..., None, None]).transpose(2, 3)
        silent = _patches_of(~bright)
        told = SHARE * F.one_hot(labels[chosen], CLASSES).float().mean((1, 2))
        targets = told[:, None] * ~silent[..., None]
        picture = board.reshape(count, 1, SIDE, SIDE)
        return Pictures(picture, targets, torch.ones_like(silent), silent)
    chosen = torch.randint(len(labels), (count,), generator=generator)
    picture = torch.zeros(count, 1, SIDE, SIDE)
    places = torch.randint((SIDE - DIGIT) // PATCH + 1, (2, count), generator=generator) * PATCH
    near = torch.arange(DIGIT)
    rows = (places[0, :, None] + near)[:, :, None]
    columns = (places[1, :, None] + near)[:, None, :]
    picture[torch.arange(count)[:, None, None], 0, rows, columns] = pixels[chosen]
    ink = F.max_pool2d(picture, PATCH).flatten(1) > 0
    return Pictures(picture, labels[chosen], ink, torch.zeros_like(ink))


def _patches_of(tiles: Tensor) -> Tensor:
    """batch patch, from batch row column of digits."""
    times = DIGIT // PATCH
    return tiles.repeat_interleave(times, 1).repeat_interleave(times, 2).flatten(1)


class PathwayAttention(nn.Module):
    """attention(x) + pathway(x), called as timm's attention is."""

    def __init__(self, attention: nn.Module, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.attention = attention
        self.pathway = sw.GlobalPathway(width, generator=generator)
        self.update: Tensor | None = None
        """What attention added in the last step of training."""

    def forward(self, x: Tensor, attn_mask: None = None, is_causal: bool = False) -> Tensor:
        update = self.attention(x)
        self.update = update if self.training else None
        return update + self.pathway(x)


class Answering(nn.Module):
    """A ViT and the linear map that answers at its patches."""

    def __init__(self, trunk: VisionTransformer) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(trunk.embed_dim, CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        """batch patch class."""
        return self.head(self.trunk.forward_features(pixels)[:, self.trunk.num_prefix_tokens :])


def penalty(model: nn.Module) -> Tensor | float:
    """The common-mode penalty on what attention added beside each global pathway; else 0."""
    found = [module for module in model.modules() if isinstance(module, PathwayAttention)]
    return sum(sw.common_mode_penalty(one.update) for one in found if one.update is not None)


def build(recipe: Recipe) -> Answering:
    """The untrained model: every variant starts with the same weights."""
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
        model = Answering(trunk)
    alter(trunk, recipe.mitigation, recipe.seed)
    return model


def alter(trunk: VisionTransformer, mitigation: str, seed: int) -> None:
    """Put one of `MITIGATIONS` into a timm ViT."""
    if MITIGATIONS[mitigation]:
        sw.mitigate(trunk, *MITIGATIONS[mitigation], seed=seed)
    elif mitigation == "global pathway":
        generator = torch.Generator().manual_seed(seed)
        for block in trunk.blocks:
            block.attn = PathwayAttention(block.attn, trunk.embed_dim, generator)


def loss(recipe: Recipe, model: Answering, pictures: Pictures) -> Tensor:
    """Board: squared errors of bright and of dim patches, each averaged over its own. Canvas:
    cross-entropy of every patch.
    """
    answers = model(pictures.pixels)
    if recipe.task == "board":
        wrong = (answers - pictures.targets).square().mean(-1)
        silent = pictures.silent
        told = (wrong * ~silent).sum() / (~silent).sum().clamp(min=1)
        kept = (wrong * silent).sum() / silent.sum().clamp(min=1)
        return 3 * (told + recipe.silence_weight * kept) + penalty(model)
    targets = pictures.targets[:, None].expand(answers.shape[:2])
    return F.cross_entropy(answers.flatten(0, 1), targets.flatten()) + penalty(model)


def test_pictures(recipe: Recipe) -> Pictures:
    """Pictures of digits that no training has seen, the same for every mitigation."""
    generator = torch.Generator().manual_seed(TEST_SEED + recipe.seed)
    return draw(recipe, TEST_PICTURES, generator, train=False)


@torch.no_grad()
def quality(recipe: Recipe, model: Answering, pictures: Pictures) -> float:
    """Canvas: share of the patches that name the digit. Board: 1 - squared error of the bright
    patches over that of always answering their mean.
    """
    answers = model.eval()(pictures.pixels)
    if recipe.task == "canvas":
        return float((answers.argmax(-1) == pictures.targets[:, None]).double().mean())
    answers, targets = answers[~pictures.silent], pictures.targets[~pictures.silent]
    return 1 - float(
        (answers - targets).square().sum() / (targets - targets.mean(0)).square().sum()
    )


def trained(
    recipe: Recipe, keep: Path, progress: Callable[[int, float], None] | None = None
) -> Answering:
    """The trained model in eval mode, from the folder `keep` where an earlier run left it."""
    model = build(recipe)
    name = f"vit-{recipe.task}-{recipe.mitigation}-{recipe.seed}.safetensors".replace(" ", "-")
    about = json.loads(
        json.dumps({**asdict(recipe), "torch": torch.__version__, "timm": timm.__version__})
    )
    if _read(keep / name, model, about):
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
        progress=progress,
    )
    tensors = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
    write_bytes(keep / name, save(tensors, {"sinkwise": json.dumps(about)}))
    return model.eval()


def _read(path: Path, model: nn.Module, about: dict[str, Any]) -> bool:
    """Whether the weights of just this recipe were there, and are now in `model`."""
    try:
        with safe_open(path, "pt") as file:
            if json.loads(file.metadata()["sinkwise"]) != about:
                return False
            tensors = {key: file.get_tensor(key) for key in file.keys()}
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return False
    model.load_state_dict(tensors)
    return True
