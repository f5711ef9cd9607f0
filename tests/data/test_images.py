"""Images of every mode, against torchvision's own resize and crop."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

from sinkwise.data import images as module
from sinkwise.data.images import images
from sinkwise.errors import InputError

PLAIN = SimpleNamespace(size=31, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), interpolation="bicubic")
IMAGENET = SimpleNamespace(
    size=31, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), interpolation="bicubic"
)


def noise(width, height, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def only(folder, preprocessing=PLAIN, **options):
    (batch,) = images(folder, **options).batches(preprocessing)
    return batch


@pytest.mark.parametrize(("width", "height"), [(53, 37), (37, 53), (41, 41), (19, 23), (110, 37)])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_pixels_are_torchvisions(tmp_path, width, height, interpolation):
    image = noise(width, height)
    image.save(tmp_path / "a.png")
    reference = transforms.Compose(
        [
            transforms.Resize(31, transforms.InterpolationMode(interpolation)),
            transforms.CenterCrop(31),
            transforms.ToTensor(),
            transforms.Normalize(IMAGENET.mean, IMAGENET.std),
        ]
    )
    wanted = SimpleNamespace(**vars(IMAGENET) | {"interpolation": interpolation})
    batch = only(tmp_path, wanted)
    assert batch.dtype == torch.float32
    torch.testing.assert_close(batch[0], reference(image), atol=1e-6, rtol=0)


def test_batches_keep_the_order_of_names_and_the_number_asked_for(tmp_path):
    (tmp_path / "b").mkdir()
    for value, name in enumerate(["a.PNG", "b/c.jpeg", "b/d.Bmp", "e.gif", "f.tiff", "g.webp"]):
        Image.new("RGB", (13, 11), (40 * value,) * 3).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "._a.jpg").write_bytes(b"not one either")
    inputs = images(tmp_path, samples=5, batch_size=2)
    batches = list(inputs.batches(PLAIN))
    assert len(batches) == 3
    assert [tuple(batch.shape) for batch in batches] == [(2, 3, 31, 31)] * 2 + [(1, 3, 31, 31)]
    shades = torch.cat(batches).mean((1, 2, 3)) * 255
    torch.testing.assert_close(shades, 40.0 * torch.arange(5), atol=2, rtol=0)


def test_a_size_given_here_wins(tmp_path):
    noise(53, 37).save(tmp_path / "a.png")
    assert only(tmp_path, size=17).shape == (1, 3, 17, 17)


def save_palette(path):
    image = noise(41, 41).quantize(16)
    image.save(path, transparency=bytes([0] + [255] * 15))


KINDS = {
    "RGBA": lambda path: Image.new("RGBA", (41, 41), (200, 100, 50, 255)).save(path),
    "L": lambda path: Image.new("L", (41, 41), 90).save(path),
    "LA": lambda path: Image.new("LA", (41, 41), (90, 255)).save(path),
    "1": lambda path: Image.new("1", (41, 41), 1).save(path),
    "palette": save_palette,
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_png_becomes_rgb(tmp_path, kind):
    KINDS[kind](tmp_path / "a.png")
    batch = only(tmp_path)
    assert batch.shape == (1, 3, 31, 31)
    expected = {"RGBA": (200, 100, 50), "L": (90,) * 3, "LA": (90,) * 3, "1": (255,) * 3}
    if kind in expected:
        means = batch.mean((0, 2, 3)) * 255
        torch.testing.assert_close(means, torch.tensor(expected[kind]).float(), atol=1, rtol=0)


def test_cmyk_becomes_rgb(tmp_path):
    Image.new("RGB", (41, 41), (200, 100, 50)).convert("CMYK").save(tmp_path / "a.jpg", quality=95)
    means = only(tmp_path).mean((0, 2, 3)) * 255
    torch.testing.assert_close(means, torch.tensor([200.0, 100.0, 50.0]), atol=4, rtol=0)


@pytest.mark.parametrize(
    ("values", "name", "shade"),
    [
        (np.full((41, 41), 32768, np.uint16), "a.png", 0.5),
        (np.full((41, 41), 200, np.uint16), "a.png", 200 / 65535),
        (np.full((41, 41), 32768, np.int32), "a.tif", 0.5),
        (np.full((41, 41), 51, np.int32), "a.tif", 0.2),
        (np.full((41, 41), 0.25, np.float32), "a.tif", 0.25),
        (np.full((41, 41), 51.0, np.float32), "a.tif", 0.2),
    ],
)
def test_deep_greys_are_scaled_and_not_clipped(tmp_path, values, name, shade):
    Image.fromarray(values).save(tmp_path / name)
    assert only(tmp_path).mean().item() == pytest.approx(shade, abs=0.003)


def test_the_camera_was_turned(tmp_path):
    """Orientation 6 is shown rotated clockwise: what is stored at the left comes to the top."""
    pixels = np.zeros((40, 40, 3), np.uint8)
    pixels[:, :20] = 255
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "a.jpg", exif=exif, quality=95)
    batch = only(tmp_path)[0]
    assert batch[:, :10].mean() > 0.95 and batch[:, -10:].mean() < 0.05


def test_a_long_strip_stays_small(tmp_path, monkeypatch):
    Image.new("RGB", (60_000, 2), (100, 100, 100)).save(tmp_path / "a.png")
    sizes = []
    original = Image.Image.resize

    def watched(self, size, *arguments, **options):
        sizes.append(size)
        return original(self, size, *arguments, **options)

    monkeypatch.setattr(Image.Image, "resize", watched)
    assert only(tmp_path).shape == (1, 3, 31, 31)
    assert max(sizes[0]) <= 4 * 31


def test_folders_without_images_are_named(tmp_path):
    with pytest.raises(InputError, match="nowhere' does not exist"):
        images(tmp_path / "nowhere")
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(InputError, match="is a file"):
        images(tmp_path / "a.txt")
    with pytest.raises(InputError, match=r"contains no image .*\.png"):
        images(tmp_path)


@pytest.mark.parametrize("damage", [b"no image at all", None], ids=["other", "truncated"])
def test_a_damaged_image_is_named(tmp_path, damage):
    file = tmp_path / "bad.png"
    noise(53, 37).save(file)
    file.write_bytes(damage or file.read_bytes()[:900])
    with pytest.raises(InputError, match=r"bad\.png' cannot be read"):
        only(tmp_path)


@pytest.mark.parametrize("option", ["samples", "batch_size", "size"])
def test_options_out_of_range_are_named(tmp_path, option):
    with pytest.raises(InputError, match=f"{option}=0"):
        images(tmp_path, **{option: 0})


def test_an_unknown_interpolation_is_named(tmp_path):
    noise(53, 37).save(tmp_path / "a.png")
    with pytest.raises(InputError, match="interpolation='area' is unknown; give one of"):
        only(tmp_path, SimpleNamespace(**vars(PLAIN) | {"interpolation": "area"}))


def test_without_pillow_the_extra_is_named(tmp_path, monkeypatch):
    noise(53, 37).save(tmp_path / "a.png")
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(InputError, match=r"pip install 'sinkwise\[vision\]'"):
        only(tmp_path)


def test_known_interpolations_are_pillows():
    for name in module.INTERPOLATIONS:
        assert Image.Resampling[name.upper()] is not None
