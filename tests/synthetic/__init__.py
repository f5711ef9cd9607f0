"""Helpers of the synthetic tests: signatures from the weights, in plain float64 einsums."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Signature:
    """Statistics of one head, for the token `sink` of each sample."""

    attention: Tensor
    """batch query key"""
    mass: Tensor
    """batch query: attention of each query to the sink."""
    ratio: Tensor
    """batch: norm of W_O v at the sink over its mean elsewhere."""
    stable_rank: Tensor
    """batch: of the update A v W_O^T."""
    update: Tensor
    """batch query dim"""


@torch.no_grad()
def signature(attention: nn.Module, x: Tensor, sink: Tensor) -> Signature:
    """The signature of a one-head attention module on its input x."""
    q, k, v = (proj(x).double() for proj in (attention.q_proj, attention.k_proj, attention.v_proj))
    scores = torch.einsum("bqd,bkd->bqk", q, k) / x.shape[-1] ** 0.5
    weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
    payload = torch.einsum("bkd,ed->bke", v, attention.o_proj.weight.double())
    update = torch.einsum("bqk,bke->bqe", weights, payload)
    rows = torch.arange(len(x))
    norms = payload.square().sum(-1).sqrt()
    others = (norms.sum(1) - norms[rows, sink]) / (x.shape[1] - 1)
    gram = torch.einsum("bqd,bqe->bde", update, update)
    return Signature(
        attention=weights,
        mass=weights[rows, :, sink],
        ratio=norms[rows, sink] / others,
        stable_rank=gram.diagonal(dim1=1, dim2=2).sum(1) / torch.linalg.eigvalsh(gram)[:, -1],
        update=update,
    )


def assert_nop(found: Signature, aligned: Tensor) -> None:
    """The aligned queries, and only they, attend to token 0, whose value is near zero."""
    others = ~aligned
    others[:, 0] = False
    assert found.mass[aligned].min() >= 0.9
    assert others.sum() == 0 or found.mass[others].max() <= 0.01
    assert found.ratio.max() <= 0.05


def assert_hub(first: Signature, second: Signature) -> None:
    """The first layer broadcasts one token in one direction; the second is idle."""
    assert first.mass.min() >= 0.95
    assert first.ratio.median() >= 0.6
    assert first.ratio.min() >= 0.5
    assert first.stable_rank.max() <= 1.1
    assert second.update.norm() < 0.05 * first.update.norm()


@torch.no_grad()
def relative_error(found: Tensor, targets: Tensor, inputs: Tensor) -> float:
    """Squared error relative to the squared update that the task requires."""
    return float((found - targets).square().sum() / (targets - inputs).square().sum())


@contextmanager
def values(attention: nn.Module, edit) -> Iterator[None]:
    """Within this context `edit` changes a copy of the attention's values in place."""

    def hook(module: nn.Module, args: tuple[Tensor], out: Tensor) -> Tensor:
        out = out.clone()
        edit(out)
        return out

    handle = attention.v_proj.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    """Whether all weights agree bit for bit."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)
