"""The q, k, v and output weights of each head, one function per way of storing them.

A new family is one function here and one entry in `LAYOUTS`.
"""

from typing import Any

from torch import Tensor, nn

from sinkwise.hosts.attributes import attribute, first_int

_SEPARATE = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("query_proj", "key_proj", "value_proj"),
    ("q_lin", "k_lin", "v_lin"),
    ("q", "k", "v"),
)
_OUTPUT = ("o_proj", "out_proj", "dense", "out_lin", "o", "Wo")
_HEAD_DIM = ("head_dim", "attention_head_size", "head_size")
_HEADS = ("num_heads", "num_attention_heads", "n_heads")
_BETWEEN = (
    "groupnorm", "attn_sub_norm", "inner_attn_ln", "o_norm", "post_attention_layernorm",
    "exclusive_self_attention",
)  # fmt: skip
"""Modules that change the heads before the output projection, which then is not the whole map."""
_INTERLEAVED = ("GPTNeoXAttention", "GPTNeoXJapaneseAttention", "BloomAttention")
"""Classes whose fused rows are [head, (q k v), head_dim] instead of [(q k v), head, head_dim]."""
_QKV = ("timm", "dinov2", "dinov3")
"""Packages whose fused rows are [(q k v), head, head_dim] in every class."""

Weights = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""q, k, v and, if it is the whole map from heads to output, o: as in `AttentionSite`."""


def head_weights(module: nn.Module, parent: nn.Module | None) -> Weights | None:
    """The weights of an attention module by head, or None if no known layout fits."""
    return next((found for layout in LAYOUTS if (found := layout(module, parent))), None)


def _by_head(weight: Tensor, width: int) -> Tensor:
    """[head, width, dim] from a linear layer's [head * width, dim]."""
    return weight.detach().unflatten(0, (-1, width))


def _output(weight: Tensor, heads: int) -> Tensor | None:
    """[head, out_dim, value_dim] from an output projection's [out_dim, head * value_dim]."""
    if weight.shape[1] % heads:
        return None
    return weight.detach().unflatten(1, (heads, -1)).transpose(0, 1)


def _matrix(module: object) -> Tensor | None:
    """The [out, in] weight of a linear layer; transformers' Conv1D stores it transposed."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    if isinstance(module, nn.Linear):
        return weight.detach()
    return weight.detach().T if type(module).__name__ == "Conv1D" else None


def _multihead(module: nn.Module, _: nn.Module | None) -> Weights | None:
    """`nn.MultiheadAttention`, and open_clip's attention, which stores its weights alike."""
    is_torch = isinstance(module, nn.MultiheadAttention)
    fused = getattr(module, "in_proj_weight", None)
    heads = first_int(module, _HEADS)
    if not heads or not (is_torch or isinstance(fused, Tensor)):
        return None
    out = _matrix(getattr(module, "out_proj", None))
    projections: Any = fused.chunk(3) if isinstance(fused, Tensor) else ()
    if is_torch and fused is None:
        projections = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    inner = getattr(module, "ln_inner", None)
    if getattr(module, "head_scale", None) is not None or not isinstance(inner, nn.Identity | None):
        out = None  # the heads are changed before their projection
    q, k, v = (_by_head(weight, weight.shape[0] // heads) for weight in projections)
    return q, k, v, None if out is None else _output(out, heads)


def _separate(module: nn.Module, parent: nn.Module | None) -> Weights | None:
    for names in _SEPARATE:
        q, k, v = (_matrix(getattr(module, name, None)) for name in names)
        if q is None or k is None or v is None:
            continue
        width = first_int(module, _HEAD_DIM)
        if width is None:
            given = first_int(module, _HEADS)
            width = q.shape[0] // given if given else None
        if not width or q.shape[0] % width or k.shape[0] % width:
            return None
        gated = q.shape[0] == 2 * width * (first_int(module, _HEADS) or 0)
        if gated:  # Qwen3-Next: rows are [head, (q gate), head_dim]
            q = q.unflatten(0, (-1, 2, width))[:, 0].flatten(0, 1)
        heads, kv_heads = q.shape[0] // width, k.shape[0] // width
        if heads % kv_heads or v.shape[0] % kv_heads:
            return None
        o = _separate_output(module, parent)
        values = _by_head(v, v.shape[0] // kv_heads)
        if o is not None and o.shape[1] != heads * values.shape[1]:
            return None  # the query projection contains something else too
        output = None if o is None else _output(o, heads)
        return _by_head(q, width), _by_head(k, width), values, output
    return None


def _separate_output(module: nn.Module, parent: nn.Module | None) -> Tensor | None:
    if any(getattr(module, name, None) is not None for name in _BETWEEN):
        return None
    outputs = [getattr(module, name, None) for name in _OUTPUT]
    # BERT and its descendants have the output projection in a sibling: attention.output.dense.
    outputs += [attribute(parent, "output.dense"), getattr(module, "proj", None)]
    return next((weight for weight in map(_matrix, outputs) if weight is not None), None)


def _fused(module: nn.Module, name: str, output: str, order: str) -> Weights | None:
    """One projection for q, k and v; `order` says how its rows are ordered, outermost first."""
    fused, out = _matrix(getattr(module, name, None)), _matrix(getattr(module, output, None))
    heads = first_int(module, _HEADS)
    if fused is None or out is None or not heads or fused.shape[0] % (3 * heads):
        return None
    if order == "head qkv":
        q, k, v = fused.unflatten(0, (heads, 3, -1)).unbind(1)
    else:
        q, k, v = fused.unflatten(0, (3, heads, -1)).unbind(0)
    return q, k, v, _output(out, heads)


def _qkv(module: nn.Module, _: nn.Module | None) -> Weights | None:
    """The `qkv` of timm and of DINO's own code; XCiT's attends over channels and has no heads."""
    kind = type(module)
    if kind.__module__.partition(".")[0] not in _QKV or kind.__name__ == "XCA":
        return None
    if getattr(module, "gate", None) is not None:
        return None
    return _fused(module, "qkv", "proj", "qkv head")


def _wqkv(module: nn.Module, _: nn.Module | None) -> Weights | None:
    for output in ("Wo", "out_proj"):
        weights = _fused(module, "Wqkv", output, "qkv head")
        if weights is not None:
            return weights
    return None


def _conv1d(module: nn.Module, _: nn.Module | None) -> Weights | None:
    if type(getattr(module, "c_attn", None)).__name__ != "Conv1D":
        return None
    if getattr(module, "is_cross_attention", False):
        return None
    return _fused(module, "c_attn", "c_proj", "qkv head")


def _interleaved(module: nn.Module, _: nn.Module | None) -> Weights | None:
    if type(module).__name__ not in _INTERLEAVED:
        return None
    return _fused(module, "query_key_value", "dense", "head qkv")


def _phi(module: nn.Module, _: nn.Module | None) -> Weights | None:
    """Rows of all query heads, then all key heads, then all value heads."""
    fused, out = (_matrix(getattr(module, name, None)) for name in ("qkv_proj", "o_proj"))
    width, heads = first_int(module, _HEAD_DIM), first_int(module, _HEADS)
    if fused is None or out is None or not width or not heads:
        return None
    rows = _by_head(fused, width) if fused.shape[0] % width == 0 else None
    if rows is None or len(rows) <= heads or (len(rows) - heads) % 2:
        return None
    kv_heads = (len(rows) - heads) // 2
    q, k, v = rows.split([heads, kv_heads, kv_heads])
    return q, k, v, _output(out, heads)


def _falcon(module: nn.Module, _: nn.Module | None) -> Weights | None:
    """Grouped [kv_head, (queries k v)], one shared key [queries k v], or [head, (q k v)]."""
    if type(module).__name__ != "FalconAttention":
        return None
    fused, out = (_matrix(getattr(module, name, None)) for name in ("query_key_value", "dense"))
    width, heads = first_int(module, _HEAD_DIM), first_int(module, _HEADS)
    if fused is None or out is None or not width or not heads:
        return None
    groups = heads
    if getattr(module, "new_decoder_architecture", False):
        groups = first_int(module, ("num_kv_heads",)) or heads
    elif getattr(module, "multi_query", False):
        groups = 1
    rows = fused.unflatten(0, (groups, -1, width))
    return rows[:, :-2].flatten(0, 1), rows[:, -2], rows[:, -1], _output(out, heads)


LAYOUTS = (_multihead, _separate, _qkv, _wqkv, _conv1d, _interleaved, _phi, _falcon)
"""The known layouts, tried in this order."""
