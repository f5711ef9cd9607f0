"""The gate as others store it: timm's Attention(gated=True), and the q_proj of Qwen3-Next."""

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
    """The `GatedAttention` that computes what a timm `Attention` does; weights copied.

    timm's qkv.bias has a part for the keys, which moves no output and is left out.

    Raises InputError for what `GatedAttention` has not: norms of queries, keys or heads, dropout of
    the output, another width of the output, and other classes than `Attention`; and where the
    installed timm has no gate.

    Reference: Wightman, 2019, pytorch-image-models (no arXiv id), `timm.layers.Attention`.
    """
    if type(attention) is not _timm_class():
        raise InputError(f"attention must be a timm.layers.Attention, not {type(attention)}")
    for name in ("q_norm", "k_norm", "norm"):
        if not isinstance(getattr(attention, name), nn.Identity):
            raise InputError(f"attention.{name} has no place in GatedAttention: it must be absent")
    if attention.proj_drop.p:
        raise InputError(f"attention.proj_drop={attention.proj_drop.p} must be 0")
    dim = attention.qkv.in_features
    if attention.proj.out_features != dim:
        raise InputError(f"attention.proj makes {attention.proj.out_features} channels, not {dim}")
    bias = attention.qkv.bias is not None
    made = GatedAttention(
        dim,
        attention.num_heads,
        head_dim=attention.head_dim,
        gate=None if attention.gate is None else "elementwise",
        dropout_p=attention.attn_drop.p,
        qkv_bias=bias,
        out_bias=attention.proj.bias is not None,
        generator=torch.Generator(),
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
    made.load_state_dict(state)
    return made.train(attention.training)


def to_timm(module: GatedAttention) -> "Attention":
    """The timm `Attention` that computes what `module` does; weights copied.

    A headwise gate becomes an elementwise one with equal rows. timm ties the gate's bias to that of
    q, k and v: where one is there, the others are there too, and 0.

    Raises InputError for what timm's `Attention` has not: grouped heads, a softmax that is not
    vanilla, causal attention of its own (timm takes `is_causal` at the call);
    and where the installed timm has no gate.

    Reference: Wightman, 2019, pytorch-image-models (no arXiv id), `timm.layers.Attention`.
    """
    timm_attention = _timm_class()
    if module.num_kv_heads != module.num_heads:
        raise InputError(f"num_kv_heads={module.num_kv_heads} must be num_heads for timm")
    if module.softmax != "vanilla":
        raise InputError(f"softmax={module.softmax!r} must be 'vanilla' for timm")
    if module.is_causal:
        raise InputError("is_causal=True has no place in timm's module: give it at its call")
    qkv_bias = module.gate is not None or module.q_proj.bias is not None
    out_bias = module.o_proj.bias is not None
    weight = module.q_proj.weight
    # Made without numbers: drawing them would move the global random state.
    made = timm_attention(
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
    made.load_state_dict(state)
    return made.train(module.training)


def split_query_gate(q_proj: nn.Linear, num_heads: int) -> tuple[nn.Linear, OutputGate]:
    """(queries, gate) of a q_proj that makes both: a head's query rows, then its gate rows.

    Weights are copied. The gate's bias is 0 where q_proj has none. Raises InputError where the rows
    are no multiple of 2 * num_heads.

    Reference: Qwen team, 2025, Qwen3-Next (no arXiv id), as in transformers' `Qwen3NextAttention`.
    """
    rows = q_proj.out_features
    if num_heads < 1 or rows % (2 * num_heads):
        raise InputError(f"q_proj makes {rows} channels, no multiple of 2 * num_heads={num_heads}")
    query_weight, gate_weight = _apart(q_proj.weight.detach(), num_heads)
    query = nn.utils.skip_init(
        nn.Linear, q_proj.in_features, rows // 2, bias=q_proj.bias is not None
    ).to(q_proj.weight)
    gate = OutputGate(
        rows // 2, num_heads, in_dim=q_proj.in_features, generator=torch.Generator()
    ).to(q_proj.weight)
    biases = _apart(_bias(q_proj), num_heads)
    query.load_state_dict(
        {"weight": query_weight} | ({} if q_proj.bias is None else {"bias": biases[0]})
    )
    gate.load_state_dict({"proj.weight": gate_weight, "proj.bias": biases[1]})
    return query, gate


def join_query_gate(query: nn.Linear, gate: OutputGate) -> nn.Linear:
    """The q_proj that makes queries and gate: the inverse of `split_query_gate`.

    A headwise gate becomes an elementwise one with equal rows. The result has a bias unless the
    queries have none and the gate's is 0. Raises InputError where the two do not read the same
    input or do not fit each other.

    Reference: Qwen team, 2025, Qwen3-Next (no arXiv id), as in transformers' `Qwen3NextAttention`.
    """
    heads, rows = gate.num_heads, query.out_features
    if rows % heads or gate.proj.in_features != query.in_features:
        raise InputError(f"query {query} and gate {gate.proj} of {heads} heads must fit each other")
    weight, bias = _elementwise(gate, rows // heads)
    if len(weight) != rows:
        raise InputError(f"gate has {len(weight)} channels, the queries {rows}: they must be equal")
    has_bias = query.bias is not None or bool(bias.any())
    joined = nn.utils.skip_init(nn.Linear, query.in_features, 2 * rows, bias=has_bias)
    joined = joined.to(query.weight)
    state = {"weight": _together(query.weight.detach(), weight, heads)}
    if has_bias:
        state["bias"] = _together(_bias(query), bias, heads)
    joined.load_state_dict(state)
    return joined


def _timm_class() -> "type[Attention]":
    import timm
    from timm.layers.attention import Attention

    if "gated" not in inspect.signature(Attention).parameters:
        raise InputError(f"timm {timm.__version__} has no Attention(gated=...): a newer one has")
    return Attention


_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def _bias(linear: nn.Linear) -> Tensor:
    """The bias of a projection, or the zeros that it does not add."""
    if linear.bias is None:
        return linear.weight.new_zeros(linear.out_features)
    return linear.bias.detach()


def _elementwise(gate: OutputGate, head_dim: int) -> tuple[Tensor, Tensor]:
    """Weight and bias with one row a channel."""
    weight, bias = gate.proj.weight.detach(), gate.proj.bias.detach()
    if gate.kind == "elementwise":
        return weight, bias
    return weight.repeat_interleave(head_dim, 0), bias.repeat_interleave(head_dim, 0)


def _apart(rows: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """The first and the second half of each head's rows, each half as one matrix."""
    first, second = rows.unflatten(0, (num_heads, 2, -1)).unbind(1)
    return first.flatten(0, 1), second.flatten(0, 1)


def _together(first: Tensor, second: Tensor, num_heads: int) -> Tensor:
    """Each head's rows of `first`, then those of `second`."""
    halves = (rows.unflatten(0, (num_heads, -1)) for rows in (first, second))
    return torch.stack(list(halves), dim=1).flatten(0, 2)
