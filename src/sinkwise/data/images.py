"""Folders of images as batches of pixels."""

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
from sinkwise.storage.checksums import checksum

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
"""File name extensions of images; case does not matter."""

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos")
"""Resampling filters for resizing."""


@runtime_checkable
class Preprocessing(Protocol):
    """How a vision model wants its images prepared."""

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
    """Images of a folder by name; a file is opened when its batch is loaded."""

    files: tuple[Path, ...]
    batch_size: int
    """Images per batch; the last batch may be smaller."""
    size: int | None = None
    """Height and width of the crop in pixels; None: the model's own."""

    def batches(
        self, preprocessing: Preprocessing
    ) -> Iterator[Float[Tensor, "batch channel height width"]]:
        """Square float32 images: shorter side resized, centre cropped, normalised.

        Raises InputError for an image that cannot be read (the error names the file) and for an
        unknown interpolation.
        """
        for batch in self.lazy_batches(preprocessing):
            yield batch.load()

    def lazy_batches(self, preprocessing: Preprocessing) -> Iterator[LazyBatch]:
        """The same batches; no image is opened before its batch is loaded."""
        if preprocessing.interpolation not in INTERPOLATIONS:
            raise InputError(
                f"interpolation={preprocessing.interpolation!r} is unknown; give one of "
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
        """What determines the model's pixels: each file's name, size and time of change, and the
        preprocessing.
        """
        return {
            "images": checksum(_state(file) for file in self.files),
            "batch_size": self.batch_size,
            "size": self.size or preprocessing.size,
            "preprocessing": repr(preprocessing),
        }


def images(
    directory: str | Path, *, samples: int = 16, batch_size: int = 4, size: int | None = None
) -> ImageInputs:
    """The first `samples` images below a folder, in the order of their names.

    Raises InputError for a folder that is missing or contains no image, and for a number of
    samples, a batch size or a size below 1.
    """
    for name, value in (("samples", samples), ("batch_size", batch_size), ("size", size)):
        if value is not None and value < 1:
            raise InputError(f"{name}={value} must be at least 1")
    folder = Path(directory)
    if not folder.exists():
        raise InputError(f"images {str(directory)!r} does not exist")
    if not folder.is_dir():
        raise InputError(f"images {str(directory)!r} is a file; give a folder of images")
    files = [
        file
        for file in sorted(folder.rglob("*"))
        # Names that begin with a dot are hidden files of other programs (macOS writes ._NAME.jpg).
        if file.suffix.lower() in EXTENSIONS and not file.name.startswith(".") and file.is_file()
    ]
    if not files:
        endings = ", *".join(sorted(EXTENSIONS))
        raise InputError(f"images {str(directory)!r} contains no image (a file named *{endings})")
    return ImageInputs(tuple(files[:samples]), batch_size, size)


def _state(file: Path) -> str:
    try:
        state = file.stat()
    except OSError as error:
        raise InputError(f"image {str(file)!r} cannot be read: {error}") from error
    return f"{file.name} {state.st_size} {state.st_mtime_ns}\n"


def _pixels(file: Path, size: int, interpolation: str) -> Float[Tensor, "3 size size"]:
    """One image with values in [0, 1]."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise InputError("images need pillow: pip install 'sinkwise[vision]'") from error
    try:
        with Image.open(file) as opened:
            image = _rgb(ImageOps.exif_transpose(opened))
    except MemoryError:
        raise
    except Exception as error:  # Pillow raises nearly any kind for damaged files
        raise InputError(f"image {str(file)!r} cannot be read: {error}") from error
    square = _square(image, size, Image.Resampling[interpolation.upper()])
    return torch.from_numpy(np.array(square)).permute(2, 0, 1).float() / 255


def _rgb(image: Any) -> Any:
    """An 8-bit RGB image from any of Pillow's modes."""
    from PIL import Image

    if image.mode == "F" or image.mode.startswith("I"):
        # Pillow would clip these at 255. Only I;16 defines its white; for the others it is the
        # smallest usual white point that no value exceeds.
        values = np.asarray(image, dtype=np.float64)
        top = 65535 if image.mode.startswith("I;16") else values.max()
        white = 1 if image.mode == "F" and top <= 1 else 255 if top <= 255 else 65535
        grey = np.rint(values.clip(0, white) * (255 / white)).astype(np.uint8)
        return Image.fromarray(grey).convert("RGB")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # straight to RGB, Pillow warns
    return image.convert("RGB")


def _square(image: Any, size: int, resampling: Any) -> Any:
    """The centre of `image`, its shorter side resized to `size`."""
    short = min(image.size)
    # Only the middle of a long strip survives the crop: resizing all of it could take gigabytes.
    width, height = (min(side, 4 * short) for side in image.size)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    image = image.crop((left, top, left + width, top + height))
    width, height = (int(size * side / short) for side in image.size)
    image = image.resize((width, height), resampling)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.crop((left, top, left + size, top + size))
