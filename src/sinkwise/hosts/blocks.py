"""The blocks of a model: the repeated layers that contain attention, numbered consecutively."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

_ATTENTION = re.compile(r"att(n|ention)", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class Block:
    """One block: an element of a list of layers."""

    name: str
    module: nn.Module
    layer: int
    """Index among all blocks of the model; the encoder's come before the decoder's."""
    siblings: int
    """Number of blocks in the list."""


def clean(path: str) -> str:
    """The module path without the wrapper names that torch.compile inserts."""
    return ".".join(part for part in path.split(".") if part != "_orig_mod")


def holds_attention(module: nn.Module) -> bool:
    """True if the class or attribute name of the module, or of a descendant, says attention."""
    return any(
        isinstance(child, nn.MultiheadAttention)
        or _ATTENTION.search(type(child).__name__)
        or _ATTENTION.search(name.rpartition(".")[2])
        for name, child in module.named_modules()
    )


def _lists(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList | nn.Sequential, bool]]:
    """Lists whose elements contain attention: path, list, whether all elements share one class."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module):
            children = _real(module)
            if not any(holds_attention(child) for child in children):
                continue
            yield name, module, len({type(child) for child in children}) == 1


def find_blocks(model: nn.Module) -> list[Block]:
    """The blocks of a model in module order; empty if it has no list of layers.

    A block is an element of the innermost list whose elements share one class: a stage contains
    blocks, and a block may contain a list of different parts. If no list is that uniform, it is an
    element of the outermost list.
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
    """The layers without the placeholders that precede the blocks in DINOv2's chunks."""
    return [child for child in layers if not isinstance(child, nn.Identity)]


def _related(one: str, other: str) -> bool:
    return one == other or one.startswith(other + ".") or other.startswith(one + ".")


class LayerIndex:
    """Looks up which layer a module path belongs to."""

    def __init__(self, blocks: list[Block]) -> None:
        self._blocks = {block.name: block for block in blocks}
        self._outside: dict[str, int] = {}

    def block(self, path: str) -> Block | None:
        """The block that contains the module at `path`, or None."""
        parts = path.split(".")
        for end in range(len(parts), 0, -1):
            block = self._blocks.get(".".join(parts[:end]))
            if block is not None:
                return block
        return None

    def layer(self, path: str, call: int = 0) -> int:
        """The index of the module's block.

        A block that the model runs several times (shared layers) counts once per run. Attention
        outside all blocks comes after them, in order of the first call.
        """
        block = self.block(path)
        if block is not None:
            return block.layer + (call if block.siblings == 1 else 0)
        return self._outside.setdefault(path, len(self._blocks) + len(self._outside))
