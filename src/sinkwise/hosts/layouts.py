"""The token layout of a batch, from the model's own tokens, its tokenizer and the inputs."""

import re
from typing import Any

import torch
from torch import Tensor, nn

from sinkwise.core.layout import TokenLayout, code
from sinkwise.nn.registers import RegisterTokens

_CLASS = ("cls_token", "class_embedding", "class_token", "dist_token", "distillation_token")
_LATE = ("blocks_token_only", "cls_attn_blocks")
"""Attributes of models (CaiT, XCiT) whose class token joins only after the patches' own blocks."""
_REGISTERS = ("reg_token", "register_tokens", "reg_tokens", "storage_tokens")


def token_layout(model: nn.Module, batch: Any, tokenizer: Any | None = None) -> TokenLayout | None:
    """The layout of the sequence that `model` computes from `batch` (a tensor, tuple or dict).

    None if the batch has neither images [batch channel height width] nor token ids [batch token].
    Registers that `mitigate` inserted come first.
    """
    pixels = _find(batch, ("pixel_values", "x", "image"), 4, floating=True)
    ids = _find(batch, ("input_ids",), 2, floating=False)
    if ids is not None:
        mask = batch.get("attention_mask") if isinstance(batch, dict) else None
        return _after_registers(model, _text(model, ids, mask, tokenizer), _VISION)
    layout = None if pixels is None else _image(model, pixels)
    return None if layout is None else _after_registers(model, layout, _TEXT)


_VISION = re.compile(r"(^|\.)(vision|visual)")
_TEXT = re.compile(r"(^|\.)text")


def _after_registers(model: nn.Module, layout: TokenLayout, other: re.Pattern[str]) -> TokenLayout:
    """The layout after the registers that `mitigate` inserted, which the model's code does not see.

    `other` matches the tower that this sequence does not pass through.
    """
    registers = [
        module
        for name, module in model.named_modules()
        if isinstance(module, RegisterTokens) and not other.search(name)
    ]
    count = sum(module.count for module in registers)
    front = torch.full((layout.batch, count), code("register"), dtype=torch.int64)
    return TokenLayout(torch.cat([front, layout.codes], dim=1), layout.grid)


def _find(batch: Any, names: tuple[str, ...], dims: int, floating: bool) -> Tensor | None:
    """The named entry of a dict, or the first tensor of anything else, if its form is right."""
    if isinstance(batch, dict):
        candidates = [batch[name] for name in names if name in batch]
    else:
        candidates = list(batch[:1]) if isinstance(batch, tuple | list) else [batch]
    for value in candidates:
        fits = isinstance(value, Tensor) and value.dim() == dims
        if fits and value.is_floating_point() == floating:
            return value
    return None


def _image(model: nn.Module, pixels: Tensor) -> TokenLayout | None:
    """Class tokens, registers, then patches: the order in every known family."""
    patch = patch_size(model)
    if patch is None:
        return None
    prefix: list[str] = []
    late = any(hasattr(module, part) for module in model.modules() for part in _LATE)
    for names, kind in ((_CLASS, "cls"), (_REGISTERS, "register")):
        for name, parameter in model.named_parameters():
            if name.rpartition(".")[2] in names and not late:
                prefix += [kind] * (parameter.shape[-2] if parameter.dim() > 1 else 1)
    grid = (pixels.shape[-2] // patch[0], pixels.shape[-1] // patch[1])
    return TokenLayout.of_image(pixels.shape[0], prefix=tuple(prefix), grid=grid)


def patch_size(model: nn.Module) -> tuple[int, int] | None:
    """Height and width of a patch; None if the model does not cut images into patches.

    From timm's patch embedding, or else from the first convolution whose stride equals its kernel.
    """
    for module in model.modules():
        for name in ("patch_embed", "embeds"):
            size = getattr(getattr(module, name, None), "patch_size", None)
            if isinstance(size, int):
                return (size, size)
            if isinstance(size, tuple) and len(size) == 2:
                return (int(size[0]), int(size[1]))
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.kernel_size == module.stride != (1, 1):
            return (int(module.kernel_size[0]), int(module.kernel_size[1]))
    return None


def _text(model: nn.Module, ids: Tensor, mask: Tensor | None, tokenizer: Any | None) -> TokenLayout:
    config = getattr(model, "config", None)
    special = set(getattr(tokenizer, "all_special_ids", ()) or ())
    for name in ("bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id"):
        value = getattr(config, name, None)
        special |= {value} if isinstance(value, int) else set(value or ())
    cls = getattr(tokenizer, "cls_token_id", None)
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is None:
        bos = getattr(config, "bos_token_id", None)
    codes = torch.full(ids.shape, code("text"), dtype=torch.int64)
    cpu = ids.detach().cpu()
    if special:
        codes[torch.isin(cpu, torch.tensor(sorted(special)))] = code("special")
    real = torch.ones(ids.shape, dtype=torch.bool)
    if mask is not None and mask.shape == ids.shape:
        real = mask.detach().cpu() != 0
    first = (real.cumsum(dim=-1) == 1) & real
    if isinstance(bos, int):
        codes[first & (cpu == bos)] = code("bos")
    if isinstance(cls, int):
        codes[first & (cpu == cls)] = code("cls")
    codes[~real] = code("pad")
    return TokenLayout(codes)
