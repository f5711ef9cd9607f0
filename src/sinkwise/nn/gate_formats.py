"""Conversion of gates: timm's Attention(gated=True), and the q_proj of Qwen3-Next."""

import inspect
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sinkwise.errors import InputError
from sinkwise.nn.attention import GatedAttention
from sinkwise.nn.gate import OutputGate

if TYPE_CHECKING:  # timm is an optional dependency
    from timm.layers.attention import Attention


def from_timm(attention: "Attention") -> GatedAttention:
    """A `GatedAttention` that computes the same as a timm `Attention`, with copied weights.

    The part of timm's qkv.bias for the keys changes no output and is dropped.

    Raises InputError for what `GatedAttention` does not have: norms of queries, keys or heads,
    dropout of the output, an output of a different width. Also raises InputError for any class
    other than `Attention`, and if the installed timm has no gate.

    Reference: Wightman, 2019, pytorch-image-models (no arXiv id), `timm.layers.Attention`.
    """
    if type(attention) is not _timm_class():
        raise InputError(f"attention must be a timm.layers.Attention, not {type(attention)}")
    for name in ("q_norm", "k_norm", "norm"):
        if not isinstance(getattr(attention, name), nn.Identity):
            raise InputError(
                f"attention.{name} is a {type(getattr(attention, name)).__name__}, which "
                "GatedAttention does not have; it must be nn.Identity"
            )
    if attention.proj_drop.p:
        raise InputError(f"attention.proj_drop={attention.proj_drop.p} must be 0")
    dim = attention.qkv.in_features
    if attention.proj.out_features != dim:
        raise InputError(
            f"attention.proj has {attention.proj.out_features} output channels; it must have "
            f"{dim}, as many as the input"
        )
    bias = attention.qkv.bias is not None
    converted = GatedAttention(
        dim,
        attention.num_heads,
        head_dim=attention.head_dim,
        gate=None if attention.gate is None else "elementwise",
        dropout_p=attention.attn_drop.p,
        qkv_bias=bias,
        out_bias=attention.proj.bias is not None,
        generator=torch.Generator(),
        device="cpu",
    ).to(attention.qkv.weight)
    state = {
        f"{name}.weight": part
        for name, part in zip(_PROJECTIONS, attention.qkv.weight.chunk(3), strict=True)
    }
    if bias:
        query, _, value = attention.qkv.bias.chunk(3)
        state |= {"q_proj.bias": query, "v_proj.bias": value}
    state |= {f"o_proj.{name}": tensor for name, tensor in attention.proj.state_dict().items()}
    if attention.gate is not None:
        state["gate.proj.weight"] = attention.gate.weight
        # A gate without a bias is one whose bias is 0.
        state["gate.proj.bias"] = (
            torch.zeros_like(attention.gate.weight[:, 0])
            if attention.gate.bias is None
            else attention.gate.bias
        )
    converted.load_state_dict(state)
    return converted.train(attention.training)


def to_timm(module: GatedAttention) -> "Attention":
    """A timm `Attention` that computes the same as `module`, with copied weights.

    A headwise gate becomes an elementwise one with equal rows per head. In timm, gate and q, k, v
    have either all biases or none: missing ones become 0.

    Raises InputError for what timm's `Attention` does not have: grouped heads, a softmax other than
    vanilla, built-in causal order (timm takes `is_causal` in its forward). Also raises InputError
    if the installed timm has no gate.

    Reference: Wightman, 2019, pytorch-image-models (no arXiv id), `timm.layers.Attention`.
    """
    timm_attention = _timm_class()
    if module.num_kv_heads != module.num_heads:
        raise InputError(
            f"num_kv_heads={module.num_kv_heads} must equal num_heads={module.num_heads} for timm"
        )
    if module.softmax != "vanilla":
        raise InputError(f"softmax={module.softmax!r} must be 'vanilla' for timm")
    if module.is_causal:
        raise InputError(
            "is_causal=True cannot be stored in timm's module; build with is_causal=False and give "
            "is_causal=True to its forward"
        )
    qkv_bias = module.gate is not None or module.q_proj.bias is not None
    out_bias = module.o_proj.bias is not None
    weight = module.q_proj.weight
    # Built on the meta device: drawing weights would advance the global random state.
    converted = timm_attention(
        module.q_proj.in_features,
        module.num_heads,
        attn_head_dim=module.head_dim,
        qkv_bias=qkv_bias,
        proj_bias=out_bias,
        gated=module.gate is not None,
        attn_drop=module.dropout_p,
        device="meta",
        dtype=weight.dtype,
    ).to_empty(device=weight.device)
    projections = [getattr(module, name) for name in _PROJECTIONS]
    state = {"qkv.weight": torch.cat([projection.weight for projection in projections])}
    if qkv_bias:
        state["qkv.bias"] = torch.cat([_bias(projection) for projection in projections])
    state |= {f"proj.{name}": tensor for name, tensor in module.o_proj.state_dict().items()}
    if module.gate is not None:
        state["gate.weight"], state["gate.bias"] = _elementwise(module.gate, module.head_dim)
    converted.load_state_dict(state)
    return converted.train(module.training)


def split_query_gate(q_proj: nn.Linear, num_heads: int) -> tuple[nn.Linear, OutputGate]:
    """Queries and gate of a fused q_proj, with each head's query rows before its gate rows.

    Weights are copied. The gate's bias is 0 if q_proj has none. Raises InputError if the number of
    rows is not a multiple of 2 * num_heads.

    Reference: Qwen team, 2025, Qwen3-Next (no arXiv id), as in transformers' `Qwen3NextAttention`.
    """
    rows = q_proj.out_features
    if num_heads < 1 or rows % (2 * num_heads):
        raise InputError(
            f"q_proj has {rows} output channels; it must have a multiple of 2 * num_heads="
            f"{2 * num_heads}"
        )
    query_weight, gate_weight = _halves(q_proj.weight.detach(), num_heads)
    query = nn.utils.skip_init(
        nn.Linear, q_proj.in_features, rows // 2, bias=q_proj.bias is not None
    ).to(q_proj.weight)
    gate = OutputGate(
        rows // 2,
        num_heads,
        in_dim=q_proj.in_features,
        generator=torch.Generator(),
        device="cpu",
    ).to(q_proj.weight)
    biases = _halves(_bias(q_proj), num_heads)
    query.load_state_dict(
        {"weight": query_weight} | ({} if q_proj.bias is None else {"bias": biases[0]})
    )
    gate.load_state_dict({"proj.weight": gate_weight, "proj.bias": biases[1]})
    return query, gate


def join_query_gate(query: nn.Linear, gate: OutputGate) -> nn.Linear:
    """The fused q_proj of queries and gate: the inverse of `split_query_gate`.

    A headwise gate becomes an elementwise one with equal rows per head. The result has a bias
    unless the queries have none and the gate's is 0. Raises InputError if the two differ in input
    channels or heads.

    Reference: Qwen team, 2025, Qwen3-Next (no arXiv id), as in transformers' `Qwen3NextAttention`.
    """
    heads, rows = gate.num_heads, query.out_features
    if rows % heads or gate.proj.in_features != query.in_features:
        raise InputError(
            f"query {query} and gate {gate.proj} must fit each other: equal in_features, and query "
            f"channels a multiple of the gate's {heads} heads"
        )
    weight, bias = _elementwise(gate, rows // heads)
    if len(weight) != rows:
        raise InputError(f"gate has {len(weight)} channels, the queries {rows}; they must be equal")
    has_bias = query.bias is not None or bool(bias.any())
    joined = nn.utils.skip_init(nn.Linear, query.in_features, 2 * rows, bias=has_bias)
    joined = joined.to(query.weight)
    state = {"weight": _interleave(query.weight.detach(), weight, heads)}
    if has_bias:
        state["bias"] = _interleave(_bias(query), bias, heads)
    joined.load_state_dict(state)
    return joined


def _timm_class() -> "type[Attention]":
    import timm
    from timm.layers.attention import Attention

    if "gated" not in inspect.signature(Attention).parameters:
        raise InputError(
            f"timm {timm.__version__} has no Attention(gated=...); install a newer one"
        )
    return Attention


_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def _bias(linear: nn.Linear) -> Tensor:
    """The bias of a projection, or zeros if it has none."""
    if linear.bias is None:
        return linear.weight.new_zeros(linear.out_features)
    return linear.bias.detach()


def _elementwise(gate: OutputGate, head_dim: int) -> tuple[Tensor, Tensor]:
    """Weight and bias with one row per channel."""
    weight, bias = gate.proj.weight.detach(), gate.proj.bias.detach()
    if gate.kind == "elementwise":
        return weight, bias
    return weight.repeat_interleave(head_dim, 0), bias.repeat_interleave(head_dim, 0)


def _halves(rows: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """The first and the second half of every head's rows, as two matrices."""
    first, second = rows.unflatten(0, (num_heads, 2, -1)).unbind(1)
    return first.flatten(0, 1), second.flatten(0, 1)


def _interleave(first: Tensor, second: Tensor, num_heads: int) -> Tensor:
    """For every head its rows of `first`, then its rows of `second`."""
    halves = (rows.unflatten(0, (num_heads, -1)) for rows in (first, second))
    return torch.stack(list(halves), dim=1).flatten(0, 2)
