"""The attention layers that a mitigation is inserted into: all of a model's, or none."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from sinkwise.core.records import AttentionSite
from sinkwise.errors import InputError
from sinkwise.hosts.blocks import clean, find_blocks, holds_attention
from sinkwise.hosts.sites import attention_sites


class Layer(NamedTuple):
    """A module whose forward attends, with its weights."""

    path: str
    attention: nn.Module
    site: AttentionSite


def attention_layers(model: nn.Module, submodule: str, refusal: str) -> Iterator[Layer]:
    """Every attention layer of known layout, at least one in each block that contains attention.

    Layers are yielded one by one, so that a caller's error about a known layer comes before errors
    about unknown ones.

    Raises InputError, starting with `refusal`, if there is no layer, if a block's layout is
    unknown, or if a layer already has a submodule of the name `submodule`.
    """
    modules = {clean(name): module for name, module in model.named_modules()}
    for path, module in modules.items():
        if isinstance(getattr(module, submodule, None), nn.Module):
            raise InputError(f"{refusal} {path!r}, which has {submodule!r}; call undo() first")
    paths = []
    for path, site in attention_sites(model).items():
        paths.append(path)
        yield Layer(path, modules[path], site)
    for block in find_blocks(model):
        known = any(path.startswith(f"{block.name}.") for path in paths)
        if holds_attention(block.module) and not known:
            gated = any(
                "attention" in type(module).__name__.lower() and getattr(module, "gate", None)
                for module in block.module.modules()
            )
            why = "has an output gate of its own" if gated else "has an unknown layout of weights"
            kind = type(block.module).__name__
            raise InputError(f"{refusal} {block.name!r} ({kind}): its attention {why}")
    if not paths:
        kind = type(model).__name__
        raise InputError(f"{refusal} {kind}: no attention layer was found in it")
