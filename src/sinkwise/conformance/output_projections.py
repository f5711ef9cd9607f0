"""What a model's output projections compute, observed with hooks."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from sinkwise.core.records import AttentionSite
from sinkwise.hosts.blocks import clean


class Projection(NamedTuple):
    """One call of an output projection."""

    input: Tensor | None
    """None if it is computed inside its attention module, where no hook observes it."""
    output: Tensor
    bias: Tensor | None


def observe_projections(
    model: nn.Module, sites: dict[str, AttentionSite], found: dict[str, list[Projection]]
) -> list[Any]:
    """Hooks that append every call of each site's output projection to `found`.

    They are on the module whose weight is W_O, which may be a sibling of the attention module
    (BERT). In `nn.MultiheadAttention`, and for measured sites, W_O is not called as a module: the
    hook is on the attention module itself.
    """
    modules = {clean(name): module for name, module in model.named_modules()}
    by_weight = {
        weight.data_ptr(): module
        for module in modules.values()
        if isinstance(weight := getattr(module, "weight", None), nn.Parameter)
    }
    handles = []
    for name, site in sites.items():
        attention = modules[name]
        if site.o is None:
            continue
        projection = by_weight.get(site.o.untyped_storage().data_ptr())
        calls = found.setdefault(name, [])
        if site.source != "layout":
            handles.append(attention.register_forward_hook(_appended_to(calls, None)))
        elif isinstance(attention, nn.MultiheadAttention):
            hook = _appended_to(
                calls, attention.out_proj.bias, tokens_first=not attention.batch_first
            )
            handles.append(attention.register_forward_hook(hook))
        elif projection is not None:
            hook = _appended_to(calls, projection.bias, with_input=True)
            handles.append(projection.register_forward_hook(hook))
    return handles


def _appended_to(
    calls: list[Projection], bias: Any, *, with_input: bool = False, tokens_first: bool = False
) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple, result: Any) -> None:
        out = next(tensors(result))
        if tokens_first and out.dim() == 3:
            out = out.transpose(0, 1)
        own = None if bias is None else bias.detach()
        calls.append(Projection(args[0] if with_input else None, out, own))

    return hook


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors(part)
