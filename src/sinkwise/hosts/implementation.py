"""How a model computes its attention: the implementation it is set to, sink logits of its own."""

import re

import torch
from torch import Tensor, nn

_OWNED = re.compile(r"(^|_)sinks?(_|$)|^s_aux$")
"""Parameters and layers of an attention module; one number a head makes it a logit, not a token."""


def kernels_of(model: nn.Module) -> list[str]:
    """Every `attn_implementation` that a configuration of the model names."""
    named = (
        getattr(getattr(module, "config", None), "_attn_implementation", None)
        for module in model.modules()
    )
    return list(dict.fromkeys(kernel for kernel in named if isinstance(kernel, str)))


def owned_sink(owner: nn.Module, heads: int) -> str | None:
    """The parameter or layer of an attention module that is a sink logit of its own, or None."""
    for name, parameter in owner.named_parameters(recurse=False):
        if _OWNED.search(name) and parameter.numel() in (1, heads) and matters(parameter):
            return name
    for name, layer in owner.named_children():
        weight = getattr(layer, "weight", None)
        if _OWNED.search(name) and isinstance(weight, Tensor) and weight.shape[0] == heads:
            return name
    return None


@torch.no_grad()
def matters(value: Tensor) -> bool:
    """False for a logit of -inf everywhere, which adds nothing to any denominator."""
    return value.is_floating_point() and bool((value > -torch.inf).any())
