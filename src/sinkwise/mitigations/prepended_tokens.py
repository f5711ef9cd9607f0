"""Blocks that work on more tokens than their model knows of: put in front, and hidden again."""

import inspect
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sinkwise.errors import InputError
from sinkwise.hosts.blocks import Block, find_blocks
from sinkwise.hosts.hidden import behind, stands_for, visible
from sinkwise.hosts.sites import attention_sites
from sinkwise.mitigations.base import Child, Forward, Part, Value
from sinkwise.nn.registers import RegisterTokens

CHILD = "registers"
"""The name of the tokens in the model."""

TAKES = {
    "timm.models.vision_transformer": ("Block",),
    "timm.models.eva": ("EvaBlock", "EvaBlockPostNorm"),
    "transformers.": (
        "ViTLayer", "DeiTLayer", "Dinov2Layer", "Dinov2WithRegistersLayer", "DINOv3ViTLayer",
        "CLIPEncoderLayer", "SiglipEncoderLayer", "BertLayer", "RobertaLayer", "XLMRobertaLayer",
        "CamembertLayer", "ElectraLayer",
    ),
    "open_clip.": ("ResidualAttentionBlock",),
}  # fmt: skip
"""Library → blocks that look both ways and in which the place of a token in front plays no part:
positions were added before, or rotary ones turn the patches alone.
"""

UNTURNED = "num_prefix_tokens"
"""timm's attention leaves so many tokens in front as they are, where it turns the patches."""

_STREAM = ("hidden_states", "x", "q_x")
_MASKS = ("attention_mask", "attn_mask")


class LongerBlock:
    """The forward of a block, `registers` in front of its tokens.

    The first block puts them there; each block hands on a view without them, and the next finds the
    whole stream behind that view. So whatever reads between blocks, or after them, sees the model's
    own tokens alone, and nothing is copied. Masks get columns that every query may see.
    """

    def __init__(self, path: str, forward: Any, registers: RegisterTokens, first: bool) -> None:
        self._path, self._forward = path, forward
        self._registers, self._first = registers, first
        self._names = list(inspect.signature(forward).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        if given.get("is_causal"):
            raise InputError(f"is_causal=True: the registers of {self._path!r} look both ways")
        stream = next((given[name] for name in _STREAM if name in given), None)
        if not isinstance(stream, Tensor) or stream.dim() != 3:
            raise InputError(f"{self._path!r} was called without tokens [batch token dim]")
        args, kwargs = self._with(args, kwargs, stream, self._longer(stream))
        for name in _MASKS:
            mask = given.get(name)
            if mask is not None:
                longer = longer_mask(mask, self._registers.count, stream.shape[1], name)
                args, kwargs = self._with(args, kwargs, mask, longer)
        out = self._forward(*args, **kwargs)
        if isinstance(out, tuple):
            return (visible(out[0], self._registers.count), *out[1:])
        return visible(out, self._registers.count)

    def _longer(
        self, stream: Float[Tensor, "batch token dim"]
    ) -> Float[Tensor, "batch longer dim"]:
        if self._first:
            longer = self._registers(stream)
            stands_for(stream, longer)
            return longer
        found = behind(stream)
        if found is None:
            raise InputError(
                f"{self._path!r} was given other tokens than the block before it handed on: the "
                "registers were lost on the way (re-entrant checkpointing does that: "
                "use_reentrant=False)"
            )
        return found

    @staticmethod
    def _with(args: tuple, kwargs: dict, old: Any, new: Any) -> tuple[tuple, dict]:
        """The arguments with `new` in the place of `old`."""
        return (
            tuple(new if value is old else value for value in args),
            {name: new if value is old else value for name, value in kwargs.items()},
        )


def longer_mask(mask: Any, count: int, length: int, name: str) -> Tensor:
    """A mask over `length` keys that lets every query see `count` more in front; where it has a row
    a query, the added tokens see whatever any query sees.
    """
    if not isinstance(mask, Tensor) or mask.shape[-1] != length:
        raise InputError(
            f"{name} is {tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__}; "
            f"with registers it is a tensor whose last size is the {length} tokens"
        )
    # [batch key], as flash-attn is given, has no rows.
    rows = mask.shape[-2] == length and (mask.dim() > 2 or name == "attn_mask")
    if rows:
        seen = mask.amax(-2, keepdim=True) if mask.is_floating_point() else mask.any(-2, True)
        mask = torch.cat([seen.to(mask.dtype).expand(*mask.shape[:-2], count, length), mask], -2)
    is_open = 0 if mask.is_floating_point() else 1
    return torch.cat([mask.new_full((*mask.shape[:-1], count), is_open), mask], -1)


def lengthen(model: nn.Module, registers: RegisterTokens, parts: list[Part]) -> None:
    """Put `registers` in front of the sequence that the blocks of `model` see."""
    blocks = one_tower(model)
    if hasattr(model, CHILD):
        raise InputError(f"{type(model).__name__} has {CHILD!r} already; one kind of them is right")
    weight = next(blocks[0].module.parameters())
    registers.to(device=weight.device, dtype=weight.dtype)
    parts.append(Child(model, CHILD, registers))
    for block in blocks:
        forward = block.module.forward
        longer = LongerBlock(block.name, forward, registers, first=block is blocks[0])
        parts.append(Forward(block.module, longer))
        for module in block.module.modules():
            if isinstance(count := getattr(module, UNTURNED, None), int):
                parts.append(Value(module, UNTURNED, count + registers.count))


def width(model: nn.Module) -> int:
    """Channels of a token in the blocks."""
    first = one_tower(model)[0].name
    for path, site in attention_sites(model).items():
        if site.q is not None and path.startswith(f"{first}."):
            return site.q.shape[2]
    raise InputError(f"no registers fit {type(model).__name__}: {first!r} has unknown weights")


def one_tower(model: nn.Module) -> list[Block]:
    """The blocks of a model that takes registers. Raises InputError where it does not."""
    blocks, name = find_blocks(model), type(model).__name__
    if not blocks:
        raise InputError(f"no registers fit {name}: it has no list of blocks")
    if len({block.name.rpartition(".")[0] for block in blocks}) > 1:
        raise InputError(
            f"no registers fit {name}: it has blocks in several places; give the one part of it "
            "that is meant, such as model.vision_model or model.visual"
        )
    for block in blocks:
        why = _refusal(block.module)
        if why is not None:
            raise InputError(f"no registers fit {name}: {block.name!r} {why}")
    if getattr(model, "attn_mask", None) is not None:
        raise InputError(f"no registers fit {name}: its attention is causal, and {_CAUSAL}")
    return blocks


_CAUSAL = (
    "in a causal model only tokens after a register could use it, and every later position would "
    "move; such a model learns its sink on its first token"
)


def _refusal(block: nn.Module) -> str | None:
    """Why a block takes no registers, or None."""
    kinds = [(kind.__module__, kind.__name__) for kind in type(block).__mro__]
    known = any(
        library.startswith(prefix) and kind in names
        for library, kind in kinds
        for prefix, names in TAKES.items()
    )
    if not known:
        names = ", ".join(sum(TAKES.values(), ()))
        return (
            f"is a {type(block).__name__}. Known to look both ways, with positions that tokens in "
            f"front do not move, are {names}; {_CAUSAL}"
        )
    configs = {type(getattr(module, "config", None)).__name__ for module in block.modules()}
    if getattr(block, "is_decoder", False) or "CLIPTextConfig" in configs:
        return f"is causal, and {_CAUSAL}"
    for module in block.modules():
        if isinstance(module, nn.MultiheadAttention) and not module.batch_first:
            return "has its tokens first and its batch second; batch_first=True is right"
    return None
