"""Softmax that need not sum to one: off by one, or with a learned logit in the denominator."""

from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sinkwise.errors import InputError

SoftmaxType = Literal["vanilla", "off-by-one", "learnable"]
"""What is added to the denominator: nothing, exp(0), or exp of a learned logit per head."""


def _softmax(scores: Tensor, sink: Tensor, dim: int) -> Tensor:
    """e^x / (e^sink + sum e^x); `sink` has size 1 along `dim`, or is a scalar."""
    if scores.shape[dim] == 0:
        return scores
    dtype = torch.promote_types(scores.dtype, torch.float32)
    x, logit = scores.to(dtype), sink.to(dtype)
    # The maximum includes the sink: a logit of 100 must not overflow. The result does not depend on
    # the shift, so it needs no gradient.
    top = torch.maximum(x.amax(dim, keepdim=True), logit).detach()
    top = top.masked_fill(top == -torch.inf, 0.0)
    powers = torch.exp(x - top)
    total = powers.sum(dim, keepdim=True) + torch.exp(logit - top)
    return (powers / total.masked_fill(total == 0, 1.0)).to(scores.dtype)


def softmax_one(x: Float[Tensor, "*axes"], dim: int = -1) -> Float[Tensor, "*axes"]:
    r"""The softmax beside one more score of 0, which is then dropped, along `dim`.

    $$
    \frac{e^{x_i}}{1 + \sum_j e^{x_j}}
    $$

    The weights lie in [0, 1] and sum to less than 1: to nearly 0 if all scores are low. Computed in
    float32 or better; scores of -inf get weight 0, also if there are no others.

    >>> softmax_one(torch.zeros(3))
    tensor([0.2500, 0.2500, 0.2500])

    Reference: Miller, 2023, "Attention is off by one" (no arXiv id); the sink logit fixed at 0.
    """
    return _softmax(x, x.new_zeros(()), dim)


def softmax(
    scores: Float[Tensor, "batch head query key"],
    kind: SoftmaxType = "vanilla",
    sink: Float[Tensor, " head"] | None = None,
) -> Float[Tensor, "batch head query key"]:
    r"""Softmax over the keys, with a sink in the denominator that `kind` determines.

    $$
    \frac{e^{s}}{e^{\mathrm{sink}} + \sum_{\mathrm{key}} e^{s}}
    $$

    $e^{\mathrm{sink}}$ is 0 for `vanilla`, 1 for `off-by-one`, and learned for `learnable`. This is
    the map itself, for eager attention and as the reference for `sink_attention`. A query whose
    scores are all -inf gets weights of 0, whatever the kind.

    Raises InputError for an unknown `kind`, for `learnable` without one logit per head, and for a
    logit with any other kind.

    Reference: NVIDIA, 2025, TransformerEngine (the names); OpenAI, 2025, gpt-oss, arXiv 2508.10925.
    """
    if kind not in get_args(SoftmaxType):
        raise InputError(f"kind={kind!r} must be one of {', '.join(get_args(SoftmaxType))}")
    heads = scores.shape[1]
    if kind == "learnable":
        if sink is None or sink.shape != (heads,):
            given = None if sink is None else tuple(sink.shape)
            raise InputError(
                f"sink {given} must be ({heads},), one logit per head, for kind='learnable'"
            )
        return _softmax(scores, sink[:, None, None], -1)
    if sink is not None:
        raise InputError(f"kind={kind!r} has no learned logit; sink must be None")
    return _softmax(scores, scores.new_full((), -torch.inf if kind == "vanilla" else 0.0), -1)


class SoftmaxOne(nn.Module):
    """`softmax_one` along `dim`, in place of nn.Softmax. It has no parameters.

    Reference: Miller, 2023, "Attention is off by one" (no arXiv id).
    """

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
        return softmax_one(x, self.dim)
