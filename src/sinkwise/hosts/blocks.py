"""The blocks of a model: the repeated layers that hold its attention, numbered through."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

_ATTENTION = re.compile(r"att(n|ention)", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class Block:
    """One element of a list of layers."""

    name: str
    module: nn.Module
    layer: int
    """Position among all blocks of the model: an encoder's come before its decoder's."""
    siblings: int
    """How many elements the list has."""


def clean(path: str) -> str:
    """A module path without the wrappers that torch.compile adds."""
    return ".".join(part for part in path.split(".") if part != "_orig_mod")


def holds_attention(module: nn.Module) -> bool:
    """True where a module or a descendant is called an attention by its class or its attribute."""
    return any(
        isinstance(child, nn.MultiheadAttention)
        or _ATTENTION.search(type(child).__name__)
        or _ATTENTION.search(name.rpartition(".")[2])
        for name, child in module.named_modules()
    )


def _lists(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList | nn.Sequential, bool]]:
    """Lists whose elements hold attention: path, list, whether all elements are of one class."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module):
            children = _real(module)
            if not any(holds_attention(child) for child in children):
                continue
            yield name, module, len({type(child) for child in children}) == 1


def find_blocks(model: nn.Module) -> list[Block]:
    """The blocks of a model, in the order of its modules; empty where it has no list of layers.

    A block is an element of the innermost list whose elements are all of one class (a stage holds
    blocks, a block may hold a list of unlike parts); where no list is so uniform, of the outermost.
    """
    lists = list(_lists(model))
    uniform = [(name, module) for name, module, same in lists if same]
    chosen = [
        (name, module)
        for name, module in uniform
        if not any(other.startswith(name + ".") for other, _ in uniform)
    ]
    for name, module, same in lists:
        covered = any(_related(name, other) for other, _ in chosen)
        if not same and not covered:
            chosen.append((name, module))
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    chosen.sort(key=lambda item: order[item[0]])
    blocks: list[Block] = []
    for name, module in chosen:
        siblings = len(_real(module))
        for index, child in enumerate(module):
            if not isinstance(child, nn.Identity):
                path = clean(f"{name}.{index}" if name else str(index))
                blocks.append(Block(path, child, len(blocks), siblings))
    return blocks


def _real(layers: nn.ModuleList | nn.Sequential) -> list[nn.Module]:
    """The layers but for placeholders, which DINOv2's chunks of blocks begin with."""
    return [child for child in layers if not isinstance(child, nn.Identity)]


def _related(one: str, other: str) -> bool:
    return one == other or one.startswith(other + ".") or other.startswith(one + ".")


class LayerIndex:
    """Which layer a module path belongs to."""

    def __init__(self, blocks: list[Block]) -> None:
        self._blocks = {block.name: block for block in blocks}
        self._outside: dict[str, int] = {}

    def block(self, path: str) -> Block | None:
        """The block that holds the module at `path`, or None."""
        parts = path.split(".")
        for end in range(len(parts), 0, -1):
            block = self._blocks.get(".".join(parts[:end]))
            if block is not None:
                return block
        return None

    def layer(self, path: str, call: int = 0) -> int:
        """The number of its block. A block that the model runs many times (shared layers) counts
        once for each run; attention outside all blocks comes after them, in order of first call.
        """
        block = self.block(path)
        if block is not None:
            return block.layer + (call if block.siblings == 1 else 0)
        return self._outside.setdefault(path, len(self._blocks) + len(self._outside))
