"""Folders of pictures as batches of pixels."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from sinkwise.data.batch import LazyBatch
from sinkwise.errors import InputError

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
"""The endings of a picture's name, in any case."""


INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos")
"""The ways to resize a picture."""


@runtime_checkable
class Preprocessing(Protocol):
    """What a vision model asks of its pictures."""

    @property
    def size(self) -> int:
        """Height and width, in pixels."""

    @property
    def mean(self) -> tuple[float, float, float]:
        """Mean of each channel, on values in [0, 1]."""

    @property
    def std(self) -> tuple[float, float, float]:
        """Standard deviation of each channel, on values in [0, 1]."""

    @property
    def interpolation(self) -> str:
        """`nearest`, `bilinear`, `bicubic` or `lanczos`."""


@dataclass(frozen=True)
class ImageInputs:
    """Pictures of a folder, in the order of their names; each is opened when its turn comes."""

    files: tuple[Path, ...]
    batch_size: int
    """Pictures of a batch; the last batch may be smaller."""
    size: int | None = None
    """Height and width of the crop in pixels; None: as the model asks."""

    def batches(
        self, preprocessing: Preprocessing
    ) -> Iterator[Float[Tensor, "batch channel height width"]]:
        """Square float32 pictures: shorter side resized, centre cropped, normalised.

        Raises InputError, naming the file, for a picture that cannot be read, and for an
        interpolation that is not known.
        """
        for batch in self.lazy_batches(preprocessing):
            yield batch.load()

    def lazy_batches(self, preprocessing: Preprocessing) -> Iterator[LazyBatch]:
        """The same batches; no picture is opened before its batch is loaded."""
        if preprocessing.interpolation not in INTERPOLATIONS:
            raise InputError(
                f"interpolation={preprocessing.interpolation!r} is none of "
                f"{', '.join(INTERPOLATIONS)}"
            )
        size = self.size or preprocessing.size
        mean = torch.tensor(preprocessing.mean).view(3, 1, 1)
        std = torch.tensor(preprocessing.std).view(3, 1, 1)

        def load(files: tuple[Path, ...]) -> Float[Tensor, "batch channel height width"]:
            rows = [(_pixels(f, size, preprocessing.interpolation) - mean) / std for f in files]
            return torch.stack(rows)

        for start in range(0, len(self.files), self.batch_size):
            files = self.files[start : start + self.batch_size]
            yield LazyBatch(load=partial(load, files), first=partial(load, files[:1]))

    def facts(self, preprocessing: Preprocessing) -> dict[str, Any]:
        """What decides which numbers the model gets: the files by name, size and time of change."""
        found = hashlib.blake2b(digest_size=16)
        for file in self.files:
            try:
                state = file.stat()
            except OSError as error:
                raise InputError(f"picture {str(file)!r} cannot be read: {error}") from error
            found.update(f"{file.name} {state.st_size} {state.st_mtime_ns}\n".encode())
        return {
            "pictures": found.hexdigest(),
            "batch_size": self.batch_size,
            "size": self.size or preprocessing.size,
            "preprocessing": repr(preprocessing),
        }


def images(
    directory: str | Path, *, samples: int = 16, batch_size: int = 4, size: int | None = None
) -> ImageInputs:
    """The first `samples` pictures below a folder, by name.

    Raises InputError for a folder that is missing or holds no picture, and for samples, a batch
    size or a size below 1.
    """
    for name, value in (("samples", samples), ("batch_size", batch_size), ("size", size)):
        if value is not None and value < 1:
            raise InputError(f"{name}={value} is too small: it is at least 1")
    folder = Path(directory)
    if not folder.exists():
        raise InputError(f"images {str(directory)!r} does not exist")
    if not folder.is_dir():
        raise InputError(f"images {str(directory)!r} is a file: a folder of pictures is right")
    files = [
        file
        for file in sorted(folder.rglob("*"))
        # Names that begin with a dot are other programs' notes (macOS writes ._NAME.jpg).
        if file.suffix.lower() in EXTENSIONS and not file.name.startswith(".") and file.is_file()
    ]
    if not files:
        endings = " ".join(sorted(EXTENSIONS))
        raise InputError(f"images {str(directory)!r} holds no picture (a name in {endings})")
    return ImageInputs(tuple(files[:samples]), batch_size, size)


def _pixels(file: Path, size: int, interpolation: str) -> Float[Tensor, "3 size size"]:
    """One picture with values in [0, 1]."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise InputError("images need pillow: pip install 'sinkwise[vision]'") from error
    try:
        with Image.open(file) as opened:
            picture = _rgb(ImageOps.exif_transpose(opened))
    except MemoryError:
        raise
    except Exception as error:  # damaged files make Pillow's readers raise nearly any kind
        raise InputError(f"picture {str(file)!r} cannot be read: {error}") from error
    square = _square(picture, size, Image.Resampling[interpolation.upper()])
    return torch.from_numpy(np.array(square)).permute(2, 0, 1).float() / 255


def _rgb(picture: Any) -> Any:
    """An 8-bit RGB picture from any of Pillow's modes."""
    from PIL import Image

    if picture.mode == "F" or picture.mode.startswith("I"):
        # Pillow would clip these at 255. Only I;16 says where its white is; the others mean the
        # smallest usual white that nothing exceeds.
        values = np.asarray(picture, dtype=np.float64)
        top = 65535 if picture.mode.startswith("I;16") else values.max()
        white = 1 if picture.mode == "F" and top <= 1 else 255 if top <= 255 else 65535
        grey = np.rint(values.clip(0, white) * (255 / white)).astype(np.uint8)
        return Image.fromarray(grey).convert("RGB")
    if picture.mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")  # straight to RGB, Pillow warns
    return picture.convert("RGB")


def _square(picture: Any, size: int, resampling: Any) -> Any:
    """The centre of `picture`, its shorter side resized to `size`."""
    short = min(picture.size)
    # Of a strip, only the middle can be seen: resizing all of it could take gigabytes.
    width, height = (min(side, 4 * short) for side in picture.size)
    left, top = (picture.width - width) // 2, (picture.height - height) // 2
    picture = picture.crop((left, top, left + width, top + height))
    width, height = (int(size * side / short) for side in picture.size)
    picture = picture.resize((width, height), resampling)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return picture.crop((left, top, left + size, top + size))
