"""What a block applies before and after its attention: the norm's gain, and LayerScale."""

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sinkwise.hosts.attributes import attribute

_NORMS = (
    "norm1", "layernorm_before", "input_layernorm", "ln_1", "layer_norm1", "attn_norm", "ln_attn",
    "norm_1", "layer_norm", "self_attn_layer_norm", "temporal_pre_norm", "operator_norm",
)  # fmt: skip
_POST_NORM = re.compile(r"Swin(Transformer)?V2|ResPost|PostNorm", re.IGNORECASE)
"""Classes of blocks whose first norm, whatever its name, follows the attention."""
_LAYER_SCALES = (
    "ls1.gamma", "ls_1.gamma", "layer_scale1.lambda1", "gamma_1", "lambda_1", "gamma1",
)  # fmt: skip


def layer_scale(ancestors: Sequence[nn.Module]) -> Tensor | None:
    """The LayerScale factor of the attention's update, from the nearest ancestor that has one."""
    for owner in ancestors:
        for path in _LAYER_SCALES:
            value = attribute(owner, path)
            if isinstance(value, Tensor) and value.dim() == 1:
                return value.detach()
    return None


def input_gain(ancestors: Sequence[nn.Module]) -> Tensor | None:
    """The gain per channel of the norm before the attention, from the nearest ancestor with one.

    None for post-norm blocks.
    """
    for owner in ancestors:
        gain = _gain_before_attention(owner)
        if gain is not None:
            return gain
    return None


def _gain_before_attention(block: nn.Module) -> Tensor | None:
    flags = [getattr(block, flag, True) for flag in ("norm_first", "do_layer_norm_before")]
    if _POST_NORM.search(type(block).__name__) or not all(flags):
        return None
    for name in _NORMS:
        if name == "self_attn_layer_norm" and not _is_pre_norm(block):
            continue
        norm = getattr(block, name, None)
        weight = getattr(norm, "weight", None)
        if isinstance(norm, nn.Module) and isinstance(weight, Tensor) and weight.dim() == 1:
            return weight.detach() if isinstance(norm, nn.LayerNorm) else _measured(norm, weight)
    return None


def _is_pre_norm(block: nn.Module) -> bool:
    """BART's descendants name a norm alike before (OPT, Whisper, mBART) and after attention."""
    pre_norm = type(block).__name__.startswith(("Whisper", "MBart"))
    return pre_norm or bool(getattr(block, "do_layer_norm_before", False))


@torch.no_grad()
def _measured(norm: nn.Module, weight: Tensor) -> Tensor:
    """The gain as the norm applies it (Gemma's is 1 + weight).

    It is the norm's response to a row of mean 0 and mean square 1, which every norm leaves
    unchanged except for the gain.
    """
    probe = torch.ones(1, 1, weight.shape[0], dtype=weight.dtype, device=weight.device)
    probe[..., 1::2] = -1
    if weight.shape[0] % 2:
        probe[..., -3:] = probe.new_tensor([0.5**0.5, 0.5**0.5, -(2**0.5)])
    return ((norm(probe) - norm(-probe)) / (2 * probe))[0, 0]
