"""How a model computes its attention: its implementation, and its own sink logits."""

import re

import torch
from torch import Tensor, nn

_SINK_NAME = re.compile(r"(^|_)sinks?(_|$)|^s_aux$")
"""Names of parameters and layers; one with one number per head is a sink logit, not a token."""


def attention_implementations(model: nn.Module) -> list[str]:
    """Every `attn_implementation` in the configurations of a model and its parts, each once."""
    named = (
        getattr(getattr(module, "config", None), "_attn_implementation", None)
        for module in model.modules()
    )
    return list(dict.fromkeys(name for name in named if isinstance(name, str)))


def own_sink_logit(attention: nn.Module, heads: int) -> str | None:
    """The name of the parameter or layer of an attention module that is a sink logit, or None."""
    for name, parameter in attention.named_parameters(recurse=False):
        if _SINK_NAME.search(name) and parameter.numel() in (1, heads) and has_effect(parameter):
            return name
    for name, layer in attention.named_children():
        weight = getattr(layer, "weight", None)
        if _SINK_NAME.search(name) and isinstance(weight, Tensor) and weight.shape[0] == heads:
            return name
    return None


@torch.no_grad()
def has_effect(sink_logit: Tensor) -> bool:
    """False for logits of -inf everywhere, which add nothing to any softmax denominator."""
    return sink_logit.is_floating_point() and bool((sink_logit > -torch.inf).any())
