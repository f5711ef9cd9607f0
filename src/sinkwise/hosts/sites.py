"""The attention sites of a model: which weights belong to which head, and to which module."""

from torch import nn

from sinkwise.core.records import AttentionSite
from sinkwise.hosts.block_parameters import input_gain, layer_scale
from sinkwise.hosts.blocks import clean
from sinkwise.hosts.cross_attention import is_cross
from sinkwise.hosts.head_weights import head_weights


def attention_sites(model: nn.Module) -> dict[str, AttentionSite]:
    """The attention sites of a model, by the path of the module whose forward attends.

    Weights are views of the model's own. Known layouts: separate q/k/v linear layers (transformers'
    decoders and encoders, also with grouped heads or an output gate), the fused `qkv` of timm,
    DINOv2 and DINOv3, ModernBERT's and MPT's `Wqkv`, Phi-3's grouped `qkv_proj`, GPT-2's transposed
    `c_attn`, GPT-NeoX's and BLOOM's interleaved `query_key_value`, the three layouts of that name
    in Falcon, `nn.MultiheadAttention`, and open_clip's attention. Other modules have no entry.
    """
    modules = {clean(name): module for name, module in model.named_modules()}
    sites = {}
    for name, module in modules.items():
        weights = head_weights(module, modules.get(name.rpartition(".")[0]) if name else None)
        if weights is None:
            continue
        q, k, v, o = weights
        # Keys of a different width than the queries come from another sequence.
        same_input = q.shape[2] == k.shape[2] == v.shape[2]
        # Differential attention: two maps, each over half of the values.
        differential = getattr(module, "lambda_q1", None) is not None
        ancestors = _ancestors(modules, name)
        sites[name] = AttentionSite(
            name=name,
            q=q,
            k=k if same_input else None,
            v=v if same_input and not differential else None,
            o=o,
            layer_scale=layer_scale(ancestors),
            # In cross attention, queries and keys each have their own norm.
            input_gain=None if is_cross(name) else input_gain(ancestors),
        )
    return sites


def _ancestors(modules: dict[str, nn.Module], name: str) -> list[nn.Module]:
    """The modules that contain the one at `name`, nearest first, up to the block itself."""
    found: list[nn.Module] = []
    while name:
        name = name.rpartition(".")[0]
        owner = modules.get(name)
        if owner is None or isinstance(owner, nn.ModuleList | nn.Sequential):
            break
        found.append(owner)
    return found
