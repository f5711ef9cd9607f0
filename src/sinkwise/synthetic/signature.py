"""The signatures of the mechanisms: statistics of a trained minimal model, from its weights."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from sinkwise.attention.spectrum import interaction_spectrum
from sinkwise.nn.softmax import softmax
from sinkwise.synthetic.model import Attention


@dataclass(frozen=True, eq=False, kw_only=True)
class Signature:
    """Statistics of one attention layer with one head, for the token `sink` of each sample."""

    attention: Float[Tensor, "batch query key"]
    mass: Float[Tensor, "batch query"]
    """Attention of each query to the sink, 0 to 1."""
    sink_logit_share: Float[Tensor, "batch query"]
    """Share of each query's softmax that goes to a sink logit and no token, 0 to 1."""
    value_ratio: Float[Tensor, " batch"]
    r"""$\|W_O v_s\| / \text{mean}_{j \ne s} \|W_O v_j\|$ for the sink $s$."""
    value_ratio_raw: Float[Tensor, " batch"]
    """The same ratio of v instead of W_O v: it includes components that W_O discards."""
    stable_rank: Float[Tensor, " batch"]
    r"""$\|U\|_F^2 / \sigma_1^2$ of $U = A V W_O^T$, before a gate; 1 if all queries receive one
    direction."""
    update: Float[Tensor, "batch query dim"]
    """The layer's update of the residual stream, after its gate."""
    gate: Float[Tensor, "batch query"] | None
    """Mean factor of the gate, 0 to 1; None without a gate."""
    spectrum: Float[Tensor, " head_dim"]
    r"""Singular values of $\Theta = W_Q W_K^T$, descending."""
    similarity: tuple[float, float]
    """Mean pairwise cosine similarity of the tokens before and after the layer."""

    @property
    def spectral_gap(self) -> float:
        r"""$\sigma_1 / \sigma_2$ of $\Theta$."""
        return float(self.spectrum[0] / self.spectrum[1])

    @property
    def column_share(self) -> float:
        """Share of the samples in which the sink is the most attended token."""
        largest = self.attention.mean(1).argmax(1)
        rows = torch.arange(len(largest))
        own = self.attention[rows, :, largest].mean(1) - self.mass.mean(1)
        return float((own <= 1e-6).double().mean())


@torch.no_grad()
def signatures(
    model: nn.Module, inputs: Float[Tensor, "batch token dim"], sink: Int[Tensor, " batch"]
) -> list[Signature]:
    """One signature for each `Attention` of the model, in the order of their calls.

    `sink` is a position in the states, registers included. Computed in float64.
    """
    calls: list[tuple[Attention, Tensor, Tensor | None]] = []
    states: list[Tensor] = []

    def record_call(module: nn.Module, args: tuple[Any, ...]) -> None:
        assert isinstance(module, Attention)
        calls.append((module, args[0], args[1] if len(args) > 1 else None))

    def record_states(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        states.extend((args[0], out))

    handles = []
    for module in model.modules():
        if isinstance(module, Attention):
            handles.append(module.register_forward_pre_hook(record_call))
        if any(isinstance(child, Attention) for child in module.children()):
            handles.append(module.register_forward_hook(record_states))
    try:
        model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    pairs = zip(states[::2], states[1::2], strict=True)
    return [
        _signature(*call, sink, (similarity(before), similarity(after)))
        for call, (before, after) in zip(calls, pairs, strict=True)
    ]


def _signature(
    attention: Attention,
    inputs: Tensor,
    allowed: Tensor | None,
    sink: Tensor,
    similarities: tuple[float, float],
) -> Signature:
    x = inputs.double()
    q, k, v = (
        x @ proj.weight.double().T
        for proj in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    scores = q @ k.mT / x.shape[-1] ** 0.5
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    if attention.softmax == "vanilla":
        weights = scores.softmax(-1)
    else:
        weights = softmax(scores[:, None], "learnable", attention.sink_logit(scores))[:, 0]
    output = attention.o_proj.weight.double().T
    gate = None if attention.gate is None else attention.gate.factor(inputs).double()
    heads = weights @ v
    singular = torch.linalg.svdvals(heads @ output)
    rows = torch.arange(len(x))
    spectrum = interaction_spectrum(attention.q_proj.weight[None], attention.k_proj.weight[None])[0]
    return Signature(
        attention=weights,
        mass=weights[rows, :, sink],
        sink_logit_share=1 - weights.sum(-1),
        value_ratio=_ratio((v @ output).norm(dim=-1), sink),
        value_ratio_raw=_ratio(v.norm(dim=-1), sink),
        stable_rank=singular.square().sum(-1) / singular[:, 0].square(),
        update=(heads if gate is None else heads * gate) @ output,
        gate=None if gate is None else gate.mean(-1),
        spectrum=spectrum,
        similarity=similarities,
    )


def _ratio(norms: Float[Tensor, "batch token"], sink: Tensor) -> Float[Tensor, " batch"]:
    rows = torch.arange(len(norms))
    others = torch.ones_like(norms, dtype=torch.bool)
    others[rows, sink] = False
    return norms[rows, sink] / ((norms * others).sum(1) / (norms.shape[1] - 1))


def similarity(x: Float[Tensor, "batch token dim"]) -> float:
    """Mean cosine similarity over all pairs of different tokens of a sample; -1 to 1."""
    unit = torch.nn.functional.normalize(x.double(), dim=-1)
    tokens = x.shape[1]
    pairs = (unit.sum(1).square().sum(-1) - unit.square().sum((1, 2))) / (tokens * (tokens - 1))
    return float(pairs.mean())
