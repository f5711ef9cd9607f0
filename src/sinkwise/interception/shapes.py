"""Attention tensors in the shapes of a record: [batch head token channel]."""

import torch
from torch import Tensor, nn


def four_dimensional(tensor: Tensor) -> Tensor:
    """[.. head query width] with one batch axis: missing axes added, leading ones joined."""
    while tensor.dim() < 4:
        tensor = tensor.unsqueeze(0)
    return tensor.flatten(0, -4)


def ungrouped(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values once per key/value head, where a model repeated them for its query heads.

    Recognised by their values: repeated heads are equal bit for bit, and equal heads may be shared
    without loss.
    """
    heads = k.shape[1]
    if heads == 1 or heads != v.shape[1] or k.shape[2] == 0:
        return k, v
    some = k.detach()[0, :, [0, k.shape[2] // 2, -1]].flatten(1)  # a cache's end may be empty
    new = (some[1:] != some[:-1]).any(dim=-1).tolist()  # where a head differs from the one before
    group = new.index(True) + 1 if True in new else heads
    if group == 1 or heads % group:
        return k, v
    for tensor in (k, v):
        split = tensor.unflatten(1, (-1, group))
        if not bool((split == split[:, :, :1]).all()):
            return k, v
    return k[:, ::group], v[:, ::group]


def batch_and_heads(lead: tuple[int, ...], owner: nn.Module | None) -> tuple[int, int]:
    """(batch, heads) of an attention map, from the leading axes of its scores or, where they are
    joined into one, from the number of heads that the module names.
    """
    if len(lead) >= 2:
        return int(torch.Size(lead[:-1]).numel()), lead[-1]
    joint = int(torch.Size(lead).numel())
    for attribute in ("num_heads", "num_attention_heads", "n_heads", "heads"):
        heads = getattr(owner, attribute, None)
        if isinstance(heads, int) and heads > 0 and joint % heads == 0:
            return joint // heads, heads
    return joint, 1


def with_lead(tensor: Tensor, lead: tuple[int, int]) -> Tensor:
    """Reshape [.. row col] to [batch head row col]; a single shared head stays single."""
    rows, cols = tensor.shape[-2:]
    joint = int(tensor.shape[:-2].numel())
    batch, heads = lead
    if tensor.shape[:-2] == lead:
        return tensor  # itself, so that gradients can be computed with respect to it
    if joint == batch * heads:
        return tensor.reshape(batch, heads, rows, cols)
    if joint % batch == 0:
        return tensor.reshape(batch, joint // batch, rows, cols)
    return (
        tensor.expand(batch, *tensor.shape[-3:])
        if tensor.dim() == 4
        else tensor.expand(batch, heads, rows, cols)
    )


def bias_with_lead(bias: Tensor, lead: tuple[int, int]) -> Tensor:
    """A broadcastable bias as [#batch #head query key]."""
    if bias.dim() == 3 and bias.shape[0] == lead[0] * lead[1]:
        return bias.reshape(*lead, *bias.shape[-2:])
    return four_dimensional(bias)
