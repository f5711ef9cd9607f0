"""What a sink cache must compute: keys rotated for their cache positions at every step, in float64.

Two oracles, independent of the package. `llama_logits` is a hand-written Llama, in which queries
and keys are rotated for their cache positions. `position_logits` runs any model's own modules one
token at a time, always at position 0, so that queries and keys come un-rotated, and rotates each
key by its cache position minus the query's.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache


def cache_positions(token: int, sinks: int, window: int) -> tuple[list[int], list[int]]:
    """(tokens that token t still sees, their cache positions), by counting."""
    kept = [key for key in range(token + 1) if key < sinks or token - key < window]
    return kept, list(range(len(kept)))


def rotate(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Each pair of the last axis as a complex number times e^{i angle}."""
    half = x.shape[-1] // 2
    pairs = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    rotated = torch.complex(*pairs) * torch.polar(torch.ones_like(angles), angles)
    if interleaved:
        return torch.view_as_real(rotated).flatten(-2)
    return torch.cat([rotated.real, rotated.imag], dim=-1)


@torch.no_grad()
def llama_logits(model: Any, tokens: list[int], sinks: int, window: int) -> Tensor:
    """Logits of every token, one after the other, by a Llama written out here; float64."""
    config, weights = model.config, {n: w.double() for n, w in model.state_dict().items()}
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    head = config.head_dim
    speed = model.model.rotary_emb.inv_freq.double()  # the model's own, as it rounded them

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean() + config.rms_norm_eps).sqrt() * weights[name]

    cache: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(config.num_hidden_layers)]
    out = []
    for step, token in enumerate(tokens):
        kept, position = cache_positions(step, sinks, window)
        x = weights["model.embed_tokens.weight"][token]
        for layer in range(config.num_hidden_layers):
            at = f"model.layers.{layer}."
            h = norm(x, at + "input_layernorm.weight")
            q, k, v = (weights[at + f"self_attn.{n}_proj.weight"] @ h for n in "qkv")
            cache[layer].append((k.view(groups, head), v.view(groups, head)))
            keys = torch.stack([cache[layer][j][0] for j in kept], dim=1)
            values = torch.stack([cache[layer][j][1] for j in kept], dim=1)
            angles = torch.tensor(position, dtype=torch.float64)[:, None] * speed
            keys = rotate(keys, angles, False)
            q = rotate(q.view(heads, head), angles[-1], False)
            parts = []
            for one in range(heads):
                group = one // (heads // groups)
                weight = ((keys[group] @ q[one]) / head**0.5).softmax(0)
                parts.append(weight @ values[group])
            x = x + weights[at + "self_attn.o_proj.weight"] @ torch.cat(parts)
            h = norm(x, at + "post_attention_layernorm.weight")
            gate, up, down = (weights[at + f"mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
            x = x + down @ (torch.nn.functional.silu(gate @ h) * (up @ h))
        out.append(weights["lm_head.weight"] @ norm(x, "model.norm.weight"))
    return torch.stack(out)


@dataclass
class Layer:
    """How the oracle must treat a layer of the model under test."""

    speed: Tensor | None = None
    """Radians per position of each pair; None if keys do not rotate."""
    interleaved: bool = False
    window: int | None = None
    """The layer's own sliding window."""


class PositionCache(DynamicCache):
    """Keeps everything, gives each step what it may see, in the order of their cache positions."""

    def __init__(self, layers: list[Layer], sinks: int, window: int) -> None:
        super().__init__()
        self.kinds, self.sizes = layers, (sinks, window)
        self.stored: list[list[tuple[Tensor, Tensor]]] = [[] for _ in layers]
        self.step = 0

    def kept(self, layer: int) -> tuple[list[int], list[int]]:
        """(tokens that the current one sees, their positions); a sliding layer's are real ones."""
        own = self.kinds[layer].window
        if own is None:
            return cache_positions(self.step, *self.sizes)
        near = [key for key in range(self.step + 1) if self.step - key < own]
        return near, near

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any):
        """Store un-rotated, return rotated for their cache positions."""
        self.stored[layer_idx].append((key_states, value_states))
        kept, position = self.kept(layer_idx)
        keys = torch.cat([self.stored[layer_idx][j][0] for j in kept], dim=2)
        values = torch.cat([self.stored[layer_idx][j][1] for j in kept], dim=2)
        kind = self.kinds[layer_idx]
        if kind.speed is not None:
            distance = torch.tensor(position, dtype=torch.float64) - position[-1]
            wide = 2 * len(kind.speed)
            part = rotate(keys[..., :wide], distance[:, None] * kind.speed, kind.interleaved)
            keys = torch.cat([part, keys[..., wide:]], dim=-1)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Keys before the query's own."""
        return len(self.kept(layer_idx)[0]) - 1

    def get_mask_sizes(self, query: Any, layer_idx: int = 0) -> tuple[int, int]:
        """All keys, the query the last of them."""
        longest = max(len(self.kept(layer)[0]) for layer in range(len(self.kinds)))
        keys = len(self.kept(layer_idx)[0])
        return keys, (longest - keys if isinstance(query, Tensor) else 0)

    @property
    def is_sliding(self) -> list[bool]:
        """Of each layer."""
        return [kind.window is not None for kind in self.kinds]

    is_linear = property(lambda self: [False] * len(self.kinds))
    is_dummy = property(lambda self: [False] * len(self.kinds))


@torch.no_grad()
def position_logits(
    model: Any,
    tokens: list[int],
    sinks: int,
    window: int,
    layers: list[Layer],
    positions: str = "rotary",
) -> Tensor:
    """Logits of every token by the model's own modules (in float64), one token at a time.

    `positions`: `rotary` (always position 0), `learned` (the cache position) or `bias` (none; the
    number of keys tells).
    """
    cache = PositionCache(layers, sinks, window)
    names = inspect.signature(model.forward).parameters
    out = []
    for token in tokens:
        given: dict[str, Any] = {}
        longest = max(len(cache.kept(layer)[0]) for layer in range(len(layers)))
        if positions == "rotary":
            given["position_ids"] = torch.zeros(1, 1, dtype=torch.int64)
        elif positions == "learned":
            given["position_ids"] = torch.tensor([[len(cache.kept(0)[0]) - 1]])
        if "cache_position" in names:
            given["cache_position"] = torch.tensor([longest - 1])
        ids = torch.tensor([[token]])
        given["cache" if "cache" in names else "past_key_values"] = cache
        out.append(model(ids, use_cache=True, **given).logits[0, -1])
        cache.step += 1
    return torch.stack(out)
