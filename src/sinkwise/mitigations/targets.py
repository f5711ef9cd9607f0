"""The attention layers that a mitigation goes into: all of a model's, or none."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from sinkwise.core.records import AttentionSite
from sinkwise.errors import InputError
from sinkwise.hosts.blocks import clean, find_blocks, holds_attention
from sinkwise.hosts.sites import attention_sites


class Layer(NamedTuple):
    """A module whose forward attends, and which of its weights are which."""

    path: str
    attention: nn.Module
    site: AttentionSite


def attention_layers(model: nn.Module, child: str, nothing_fits: str) -> Iterator[Layer]:
    """Every attention layer of known layout, at least one in each block that holds attention.

    One after the other, so that what a caller says of a known layer comes before what is unknown.
    Raises InputError, which begins with `nothing_fits`, where there is none, where a block's are
    unknown, or where one has a `child` already.
    """
    modules = {clean(name): module for name, module in model.named_modules()}
    for path, module in modules.items():
        if isinstance(getattr(module, child, None), nn.Module):
            raise InputError(f"{nothing_fits} {path!r}, which has {child!r}: undo() takes that out")
    paths = []
    for path, site in attention_sites(model).items():
        paths.append(path)
        yield Layer(path, modules[path], site)
    for block in find_blocks(model):
        inside = any(path.startswith(f"{block.name}.") for path in paths)
        if holds_attention(block.module) and not inside:
            gated = any(
                "attention" in type(module).__name__.lower() and getattr(module, "gate", None)
                for module in block.module.modules()
            )
            why = "has an output gate of its own" if gated else "stores its weights in another way"
            raise InputError(
                f"{nothing_fits} {block.name!r} ({type(block.module).__name__}): its attention "
                f"{why}, which is unknown here"
            )
    if not paths:
        kind = type(model).__name__
        raise InputError(f"{nothing_fits} {kind}: no attention layer was found in it")
