"""What a trained minimal model does, read off its weights: the signatures of the mechanisms."""

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
    """How one attention layer of one head treats the token `sink` of each sample."""

    attention: Float[Tensor, "batch query key"]
    mass: Float[Tensor, "batch query"]
    """What each query gives to the sink, 0 to 1."""
    spared: Float[Tensor, "batch query"]
    """What each query gives to no token, 0 to 1: the share of a sink logit."""
    value_ratio: Float[Tensor, " batch"]
    """|W_O v_s| / mean_{j != s} |W_O v_j|."""
    value_ratio_raw: Float[Tensor, " batch"]
    """The same of v: it keeps what W_O throws away."""
    stable_rank: Float[Tensor, " batch"]
    """|U|_F^2 / sigma_1^2 of U = A v W_O^T, before a gate; 1 when all tokens get one direction."""
    update: Float[Tensor, "batch query dim"]
    """What the layer adds, after its gate."""
    gate: Float[Tensor, "batch query"] | None
    """Mean factor of the gate, 0 to 1."""
    spectrum: Float[Tensor, " head_dim"]
    """Singular values of Theta = W_Q W_K^T, descending."""
    similarity: tuple[float, float]
    """Mean pairwise cosine of the tokens before and after the layer."""

    @property
    def spectral_gap(self) -> float:
        """sigma_1 / sigma_2 of Theta."""
        return float(self.spectrum[0] / self.spectrum[1])

    @property
    def column_share(self) -> float:
        """Share of the samples whose largest column of attention is the sink's."""
        largest = self.attention.mean(1).argmax(1)
        rows = torch.arange(len(largest))
        own = self.attention[rows, :, largest].mean(1) - self.mass.mean(1)
        return float((own <= 1e-6).double().mean())


@torch.no_grad()
def signatures(
    model: nn.Module, inputs: Float[Tensor, "batch token dim"], sink: Int[Tensor, " batch"]
) -> list[Signature]:
    """One signature for each `Attention` of the model, in the order of their calls.

    `sink` counts positions of the states, registers included. Computed in float64.
    """
    calls: list[tuple[Attention, Tensor, Tensor | None]] = []
    states: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
        assert isinstance(module, Attention)
        calls.append((module, args[0], args[1] if len(args) > 1 else None))

    def keep_state(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        states.extend((args[0], out))

    handles = []
    for module in model.modules():
        if isinstance(module, Attention):
            handles.append(module.register_forward_pre_hook(keep))
        if any(isinstance(child, Attention) for child in module.children()):
            handles.append(module.register_forward_hook(keep_state))
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
    read: Tensor,
    allowed: Tensor | None,
    sink: Tensor,
    similarities: tuple[float, float],
) -> Signature:
    x = read.double()
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
    gate = None if attention.gate is None else attention.gate.factor(read).double()
    heads = weights @ v
    singular = torch.linalg.svdvals(heads @ output)
    rows = torch.arange(len(x))
    spectrum = interaction_spectrum(attention.q_proj.weight[None], attention.k_proj.weight[None])[0]
    return Signature(
        attention=weights,
        mass=weights[rows, :, sink],
        spared=1 - weights.sum(-1),
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
    """Mean cosine of the pairs of different tokens, over the samples; -1 to 1."""
    unit = torch.nn.functional.normalize(x.double(), dim=-1)
    tokens = x.shape[1]
    pairs = (unit.sum(1).square().sum(-1) - unit.square().sum((1, 2))) / (tokens * (tokens - 1))
    return float(pairs.mean())
