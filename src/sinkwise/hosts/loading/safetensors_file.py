"""Weights as the file that transformers reads."""

from pathlib import Path

from torch import Tensor


def save_model(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write model.safetensors."""
    from safetensors.torch import save_file

    contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
