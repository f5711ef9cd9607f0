"""Which weights belong to which head, whatever way a model stores them."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sinkwise.core.records import AttentionSite
from sinkwise.hosts.blocks import clean

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
_NORM = (
    "norm1", "layernorm_before", "input_layernorm", "ln_1", "layer_norm1", "attn_norm", "ln_attn",
    "norm_1", "layer_norm", "self_attn_layer_norm", "temporal_pre_norm", "operator_norm",
)  # fmt: skip
_POST_NORM = re.compile(r"Swin(Transformer)?V2|ResPost|PostNorm", re.IGNORECASE)
"""Blocks whose first norm, whatever its name, follows the attention."""
_CROSS = re.compile(r"cross|encoder_attn|multihead_attn|encdec", re.IGNORECASE)
_LAYER_SCALE = (
    "ls1.gamma", "ls_1.gamma", "layer_scale1.lambda1", "gamma_1", "lambda_1", "gamma1",
)  # fmt: skip
_BETWEEN = (
    "groupnorm", "attn_sub_norm", "inner_attn_ln", "o_norm", "post_attention_layernorm",
    "exclusive_self_attention",
)  # fmt: skip
"""What an attention module may do to its heads before their projection, which then is not all."""
_INTERLEAVED = ("GPTNeoXAttention", "GPTNeoXJapaneseAttention", "BloomAttention")
"""Classes whose fused rows are [head, (q k v), head_dim], not [(q k v), head, head_dim]."""
_QKV = ("timm", "dinov2", "dinov3")
"""Packages whose fused rows are [(q k v), head, head_dim], whatever a class is called."""

Weights = tuple[Tensor, Tensor, Tensor, Tensor | None]


def attention_sites(model: nn.Module) -> dict[str, AttentionSite]:
    """The sites of a model by the path of the module whose forward attends, views of its weights.

    Layouts known here: separate q/k/v linears (transformers' decoders and encoders, with grouped
    heads, with an output gate), the fused `qkv` of timm, DINOv2 and DINOv3, ModernBERT's and MPT's
    `Wqkv`, Phi-3's grouped `qkv_proj`, GPT-2's transposed `c_attn`, GPT-NeoX' and BLOOM's
    interleaved `query_key_value`, Falcon's three of that name, `nn.MultiheadAttention` and
    open_clip's. Others have no entry.
    """
    sites: dict[str, AttentionSite] = {}
    modules = {clean(name): module for name, module in model.named_modules()}
    for name, module in modules.items():
        for layout in _LAYOUTS:
            weights = layout(module, modules.get(_parent(name)))
            if weights is not None:
                q, k, v, o = weights
                # Keys of another width than the queries' come from another sequence.
                own = q.shape[2] == k.shape[2] == v.shape[2]
                # Differential attention: two maps, each over half of the values.
                split = getattr(module, "lambda_q1", None) is not None
                sites[name] = AttentionSite(
                    name=name,
                    q=q,
                    k=k if own else None,
                    v=v if own and not split else None,
                    o=o,
                    layer_scale=_near(modules, name, _layer_scale),
                    input_gain=None if _is_cross(name) else _near(modules, name, _input_gain),
                )
                break
    return sites


def _is_cross(name: str) -> bool:
    """True where queries and keys are of different sequences, each with a norm of its own."""
    return _CROSS.search(name.rpartition(".")[2]) is not None


def _parent(name: str) -> str:
    return name.rpartition(".")[0] if name else "?"


def _attribute(module: object, path: str) -> object:
    for part in path.split("."):
        module = getattr(module, part, None)
    return module


def _first_int(module: nn.Module, names: tuple[str, ...]) -> int | None:
    for source in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(source, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


def _heads(weight: Tensor, width: int) -> Tensor:
    """[head, width, dim] from a linear's [head * width, dim]."""
    return weight.detach().unflatten(0, (-1, width))


def _output(weight: Tensor, heads: int) -> Tensor | None:
    """[head, out_dim, value_dim] from an output linear's [out_dim, head * value_dim]."""
    if weight.shape[1] % heads:
        return None
    return weight.detach().unflatten(1, (heads, -1)).transpose(0, 1)


def _matrix(module: object) -> Tensor | None:
    """The [out, in] weight of a linear map; transformers' Conv1D stores it transposed."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    if isinstance(module, nn.Linear):
        return weight.detach()
    return weight.detach().T if type(module).__name__ == "Conv1D" else None


def _multihead(module: nn.Module, _: nn.Module | None) -> Weights | None:
    """`nn.MultiheadAttention`, and open_clip's attention, which stores its weights alike."""
    torchs = isinstance(module, nn.MultiheadAttention)
    fused = getattr(module, "in_proj_weight", None)
    heads = _first_int(module, _HEADS)
    if not heads or not (torchs or isinstance(fused, Tensor)):
        return None
    out = _matrix(getattr(module, "out_proj", None))
    parts: Any = fused.chunk(3) if isinstance(fused, Tensor) else ()
    if torchs and fused is None:
        parts = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    inner = getattr(module, "ln_inner", None)
    if getattr(module, "head_scale", None) is not None or not isinstance(inner, nn.Identity | None):
        out = None  # something else lies between the heads and their projection
    q, k, v = (_heads(part, part.shape[0] // heads) for part in parts)
    return q, k, v, None if out is None else _output(out, heads)


def _separate(module: nn.Module, parent: nn.Module | None) -> Weights | None:
    for names in _SEPARATE:
        q, k, v = (_matrix(getattr(module, name, None)) for name in names)
        if q is None or k is None or v is None:
            continue
        width = _first_int(module, _HEAD_DIM)
        if width is None:
            given = _first_int(module, _HEADS)
            width = q.shape[0] // given if given else None
        if not width or q.shape[0] % width or k.shape[0] % width:
            return None
        gated = q.shape[0] == 2 * width * (_first_int(module, _HEADS) or 0)
        if gated:  # Qwen3-Next: rows are [head, (q gate), head_dim]
            q = q.unflatten(0, (-1, 2, width))[:, 0].flatten(0, 1)
        heads, kv_heads = q.shape[0] // width, k.shape[0] // width
        if heads % kv_heads or v.shape[0] % kv_heads:
            return None
        # BERT and its kin keep the output projection in a sibling: attention.output.dense.
        outputs = [getattr(module, name, None) for name in _OUTPUT]
        outputs += [_attribute(parent, "output.dense"), getattr(module, "proj", None)]
        o = next((w for w in map(_matrix, outputs) if w is not None), None)
        if any(getattr(module, name, None) is not None for name in _BETWEEN):
            o = None
        values = _heads(v, v.shape[0] // kv_heads)
        if o is not None and o.shape[1] != heads * values.shape[1]:
            return None  # the query projection carries something else too
        return _heads(q, width), _heads(k, width), values, None if o is None else _output(o, heads)
    return None


def _fused(module: nn.Module, name: str, output: str, order: str) -> Weights | None:
    """One projection for all three; `order` says what its rows list first."""
    fused, out = _matrix(getattr(module, name, None)), _matrix(getattr(module, output, None))
    heads = _first_int(module, _HEADS)
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
    width, heads = _first_int(module, _HEAD_DIM), _first_int(module, _HEADS)
    if fused is None or out is None or not width or not heads:
        return None
    rows = _heads(fused, width) if fused.shape[0] % width == 0 else None
    if rows is None or len(rows) <= heads or (len(rows) - heads) % 2:
        return None
    kv = (len(rows) - heads) // 2
    q, k, v = rows.split([heads, kv, kv])
    return q, k, v, _output(out, heads)


def _falcon(module: nn.Module, _: nn.Module | None) -> Weights | None:
    """Grouped [kv_head, (queries k v)], one shared key [queries k v], or [head, (q k v)]."""
    if type(module).__name__ != "FalconAttention":
        return None
    fused, out = (_matrix(getattr(module, name, None)) for name in ("query_key_value", "dense"))
    width, heads = _first_int(module, _HEAD_DIM), _first_int(module, _HEADS)
    if fused is None or out is None or not width or not heads:
        return None
    groups = heads
    if getattr(module, "new_decoder_architecture", False):
        groups = _first_int(module, ("num_kv_heads",)) or heads
    elif getattr(module, "multi_query", False):
        groups = 1
    rows = fused.unflatten(0, (groups, -1, width))
    return rows[:, :-2].flatten(0, 1), rows[:, -2], rows[:, -1], _output(out, heads)


_LAYOUTS = (_multihead, _separate, _qkv, _wqkv, _conv1d, _interleaved, _phi, _falcon)


def _near(
    modules: dict[str, nn.Module], name: str, find: Callable[[nn.Module], Tensor | None]
) -> Tensor | None:
    """What `find` sees in the nearest ancestors, no further than the block's own list."""
    while name:
        name = _parent(name)
        owner = modules.get(name)
        if owner is None or isinstance(owner, nn.ModuleList | nn.Sequential):
            return None
        found = find(owner)
        if found is not None:
            return found
    return None


def _layer_scale(block: nn.Module) -> Tensor | None:
    for path in _LAYER_SCALE:
        value = _attribute(block, path)
        if isinstance(value, Tensor) and value.dim() == 1:
            return value.detach()
    return None


def _input_gain(block: nn.Module) -> Tensor | None:
    """Per-channel gain of a pre-norm block's first norm."""
    flags = [getattr(block, flag, True) for flag in ("norm_first", "do_layer_norm_before")]
    if _POST_NORM.search(type(block).__name__) or not all(flags):
        return None
    for name in _NORM:
        if name == "self_attn_layer_norm" and not _is_pre_norm(block):
            continue
        norm = getattr(block, name, None)
        weight = getattr(norm, "weight", None)
        if isinstance(norm, nn.Module) and isinstance(weight, Tensor) and weight.dim() == 1:
            return weight.detach() if isinstance(norm, nn.LayerNorm) else _measured(norm, weight)
    return None


def _is_pre_norm(block: nn.Module) -> bool:
    """BART's children name the norm alike before (OPT, Whisper, mBART) and after the attention."""
    early = type(block).__name__.startswith(("Whisper", "MBart"))
    return early or bool(getattr(block, "do_layer_norm_before", False))


@torch.no_grad()
def _measured(norm: nn.Module, weight: Tensor) -> Tensor:
    """The gain as the norm applies it (Gemma's is 1 + weight): its answer to a row of mean 0 and
    mean square 1, which every norm leaves as it is but for the gain.
    """
    probe = torch.ones(1, 1, weight.shape[0], dtype=weight.dtype, device=weight.device)
    probe[..., 1::2] = -1
    if weight.shape[0] % 2:
        probe[..., -3:] = probe.new_tensor([0.5**0.5, 0.5**0.5, -(2**0.5)])
    return ((norm(probe) - norm(-probe)) / (2 * probe))[0, 0]
