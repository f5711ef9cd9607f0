"""Blocks that compute on more tokens than their model: prepended, and hidden after each block."""

import inspect
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sinkwise.errors import InputError
from sinkwise.hosts.blocks import Block, find_blocks
from sinkwise.hosts.hidden import remember, remembered, without_prefix
from sinkwise.hosts.sites import attention_sites
from sinkwise.mitigations.base import AddedModule, Insertion, ReplacedAttribute, ReplacedForward
from sinkwise.nn.registers import RegisterTokens

SUBMODULE = "registers"
"""The name of the tokens in the model."""

SUPPORTED = {
    "timm.models.vision_transformer": ("Block",),
    "timm.models.eva": ("EvaBlock", "EvaBlockPostNorm"),
    "transformers.": (
        "ViTLayer", "DeiTLayer", "Dinov2Layer", "Dinov2WithRegistersLayer", "DINOv3ViTLayer",
        "CLIPEncoderLayer", "SiglipEncoderLayer", "BertLayer", "RobertaLayer", "XLMRobertaLayer",
        "CamembertLayer", "ElectraLayer",
    ),
    "open_clip.": ("ResidualAttentionBlock",),
}  # fmt: skip
"""Library → classes of bidirectional blocks in which a prepended token's position does not matter:
positions are added before the blocks, or rotary positions apply to the patches only.
"""

UNROTATED = "num_prefix_tokens"
"""In timm's attention, the number of leading tokens without rotary positions."""

_TOKENS = ("hidden_states", "x", "q_x")
_MASKS = ("attention_mask", "attn_mask")

_CAUSAL = (
    "in a causal model all later positions would shift; its sink is usually the first token, which "
    "Gate and SinkLogits act on"
)


class ExtendedBlock:
    """The forward of a block, with `registers` before its tokens.

    The first block prepends them. Each block returns a view without them, from which the next finds
    the whole sequence. Code between or after the blocks sees the model's own tokens only, and
    nothing is copied. Masks get columns that every query may attend to.
    """

    def __init__(self, path: str, forward: Any, registers: RegisterTokens, first: bool) -> None:
        self._path, self._forward = path, forward
        self._registers, self._first = registers, first
        self._names = list(inspect.signature(forward).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        if given.get("is_causal"):
            raise InputError(
                f"is_causal=True, but {self._path!r} has registers, which need bidirectional "
                "attention; call it without is_causal, or undo() the registers"
            )
        tokens = next((given[name] for name in _TOKENS if name in given), None)
        if not isinstance(tokens, Tensor) or tokens.dim() != 3:
            raise InputError(
                f"{self._path!r} was called without tokens [batch token dim], which its registers "
                "need"
            )
        args, kwargs = self._replace(args, kwargs, tokens, self._extended(tokens))
        for name in _MASKS:
            mask = given.get(name)
            if mask is not None:
                extended = extended_mask(mask, self._registers.count, tokens.shape[1], name)
                args, kwargs = self._replace(args, kwargs, mask, extended)
        out = self._forward(*args, **kwargs)
        if isinstance(out, tuple):
            return (without_prefix(out[0], self._registers.count), *out[1:])
        return without_prefix(out, self._registers.count)

    def _extended(
        self, tokens: Float[Tensor, "batch token dim"]
    ) -> Float[Tensor, "batch longer dim"]:
        if self._first:
            extended = self._registers(tokens)
            remember(tokens, extended)
            return extended
        found = remembered(tokens)
        if found is None:
            raise InputError(
                f"{self._path!r} was given other tokens than the block before it returned, so the "
                "registers were lost; re-entrant checkpointing does that (use_reentrant=False)"
            )
        return found

    @staticmethod
    def _replace(args: tuple, kwargs: dict, old: Any, new: Any) -> tuple[tuple, dict]:
        """The arguments with `new` in place of `old`."""
        return (
            tuple(new if value is old else value for value in args),
            {name: new if value is old else value for name, value in kwargs.items()},
        )


def extended_mask(mask: Any, count: int, length: int, name: str) -> Tensor:
    """A mask over `length` keys, extended by `count` leading keys that every query may attend to.

    If it has one row per query, each prepended token may attend to every key that any query may.
    Raises InputError if the mask is not over `length` keys.
    """
    if not isinstance(mask, Tensor) or mask.shape[-1] != length:
        given = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(
            f"{name} is {given}; with registers it must be a tensor whose last size is the number "
            f"of tokens, {length}"
        )
    # [batch key], as flash-attn takes it, has no rows.
    has_rows = mask.shape[-2] == length and (mask.dim() > 2 or name == "attn_mask")
    if has_rows:
        seen = mask.amax(-2, keepdim=True) if mask.is_floating_point() else mask.any(-2, True)
        mask = torch.cat([seen.to(mask.dtype).expand(*mask.shape[:-2], count, length), mask], -2)
    is_open = 0 if mask.is_floating_point() else 1
    return torch.cat([mask.new_full((*mask.shape[:-1], count), is_open), mask], -1)


def prepend(model: nn.Module, registers: RegisterTokens, insertions: list[Insertion]) -> None:
    """Prepend `registers` to the sequence that the blocks of `model` see."""
    blocks = supported_blocks(model)
    if hasattr(model, SUBMODULE):
        raise InputError(
            f"{type(model).__name__} has {SUBMODULE!r} already; give Registers or RegisterNeurons, "
            "not both"
        )
    weight = next(blocks[0].module.parameters())
    registers.to(device=weight.device, dtype=weight.dtype)
    insertions.append(AddedModule(model, SUBMODULE, registers))
    for block in blocks:
        forward = block.module.forward
        extended = ExtendedBlock(block.name, forward, registers, first=block is blocks[0])
        insertions.append(ReplacedForward(block.module, extended))
        for module in block.module.modules():
            if isinstance(count := getattr(module, UNROTATED, None), int):
                insertions.append(ReplacedAttribute(module, UNROTATED, count + registers.count))


def token_width(model: nn.Module) -> int:
    """The number of channels of a token in the blocks. Raises InputError for unknown weights."""
    first = supported_blocks(model)[0].name
    for path, site in attention_sites(model).items():
        if site.q is not None and path.startswith(f"{first}."):
            return site.q.shape[2]
    raise InputError(
        f"cannot add registers to {type(model).__name__}: {first!r} has unknown attention weights"
    )


def supported_blocks(model: nn.Module) -> list[Block]:
    """The blocks of a model that supports registers. Raises InputError for other models."""
    blocks, refusal = find_blocks(model), f"cannot add registers to {type(model).__name__}"
    if not blocks:
        raise InputError(f"{refusal}: it has no list of blocks")
    if len({block.name.rpartition(".")[0] for block in blocks}) > 1:
        raise InputError(
            f"{refusal}: it has several lists of blocks; give one part of it, such as "
            "model.vision_model or model.visual"
        )
    for block in blocks:
        why = _unsupported(block.module)
        if why is not None:
            raise InputError(f"{refusal}: {block.name!r} {why}")
    if getattr(model, "attn_mask", None) is not None:
        raise InputError(f"{refusal}: its attention is causal, and {_CAUSAL}")
    return blocks


def _unsupported(block: nn.Module) -> str | None:
    """Why a block does not support registers, or None."""
    kinds = [(kind.__module__, kind.__name__) for kind in type(block).__mro__]
    known = any(
        library.startswith(prefix) and kind in names
        for library, kind in kinds
        for prefix, names in SUPPORTED.items()
    )
    if not known:
        names = ", ".join(sum(SUPPORTED.values(), ()))
        return (
            f"is a {type(block).__name__}. Supported are {names}: bidirectional, with positions "
            f"that prepended tokens do not shift; {_CAUSAL}"
        )
    configs = {type(getattr(module, "config", None)).__name__ for module in block.modules()}
    if getattr(block, "is_decoder", False) or "CLIPTextConfig" in configs:
        return f"is causal, and {_CAUSAL}"
    for module in block.modules():
        if isinstance(module, nn.MultiheadAttention) and not module.batch_first:
            return "takes tokens as [token batch dim]; build it with batch_first=True"
    return None
