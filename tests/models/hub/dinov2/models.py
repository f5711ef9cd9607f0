"""Modules and parameters by the names that DINOv2's own repository gives them."""

import torch
from torch import Tensor, nn

DIM, HEADS, PATCH, GRID = 40, 5, 8, 3


class Attention(nn.Module):
    """One projection [(q k v), head, head_dim]."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.num_heads, self.fused, self.scale = HEADS, fused, (DIM // HEADS) ** -0.5
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.attn_drop, self.proj_drop = nn.Dropout(0.0), nn.Dropout(0.0)

    def forward(self, x: Tensor, attn_bias: Tensor | None = None) -> Tensor:
        batch, tokens, dim = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, dim // self.num_heads)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        if self.fused:
            out = nn.functional.scaled_dot_product_attention(q, k, v)
        else:
            out = self.attn_drop(((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1)) @ v
        return self.proj_drop(self.proj(out.transpose(1, 2).reshape(batch, tokens, dim)))


class MemEffAttention(Attention):
    """Without xformers, its parent."""


class LayerScale(nn.Module):
    """A learned factor per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((DIM,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class NestedTensorBlock(nn.Module):
    """A pre-norm block."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM, eps=1e-6), nn.LayerNorm(DIM, eps=1e-6)
        self.attn, self.ls1, self.ls2 = MemEffAttention(fused), LayerScale(), LayerScale()
        self.mlp = nn.Sequential(nn.Linear(DIM, 53), nn.GELU(), nn.Linear(53, DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class BlockChunk(nn.ModuleList):
    """Some blocks, after one identity for each block of earlier chunks."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x)
        return x


class PatchEmbed(nn.Module):
    """Patches as tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.img_size, self.patch_size = (GRID * PATCH,) * 2, (PATCH,) * 2
        self.proj = nn.Conv2d(3, DIM, PATCH, PATCH)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class DinoVisionTransformer(nn.Module):
    """Class token, registers, patches."""

    def __init__(self, fused: bool = True, registers: int = 4, chunks: int = 0) -> None:
        super().__init__()
        self.patch_embed, self.num_register_tokens = PatchEmbed(), registers
        self.cls_token = nn.Parameter(torch.randn(1, 1, DIM))
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + GRID * GRID, DIM))
        self.register_tokens = nn.Parameter(torch.randn(1, registers, DIM)) if registers else None
        self.mask_token = nn.Parameter(torch.zeros(1, DIM))
        blocks = [NestedTensorBlock(fused) for _ in range(max(2, 2 * chunks))]
        self.chunked_blocks = chunks > 0
        if chunks:
            parts = (
                BlockChunk([nn.Identity()] * i + blocks[i : i + 2]) for i in range(0, 2 * chunks, 2)
            )
            self.blocks = nn.ModuleList(parts)
        else:
            self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(DIM, eps=1e-6), nn.Identity()

    def interpolate_pos_encoding(self, x: Tensor, height: int, width: int) -> Tensor:
        rows, cols = height // PATCH, width // PATCH
        grid = self.pos_embed[:, 1:].reshape(1, GRID, GRID, DIM).permute(0, 3, 1, 2)
        grid = nn.functional.interpolate(grid, size=(rows, cols), mode="bicubic")
        return torch.cat([self.pos_embed[:, :1], grid.flatten(2).transpose(1, 2)], dim=1)

    def prepare_tokens_with_masks(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        tokens = torch.cat([self.cls_token.expand(len(x), -1, -1), self.patch_embed(x)], dim=1)
        tokens = tokens + self.interpolate_pos_encoding(tokens, height, width)
        if self.register_tokens is None:
            return tokens
        registers = self.register_tokens.expand(len(x), -1, -1)
        return torch.cat([tokens[:, :1], registers, tokens[:, 1:]], dim=1)

    def forward_features(self, x: Tensor) -> dict[str, Tensor]:
        x = self.prepare_tokens_with_masks(x)
        for block in self.blocks:
            x = block(x)
        normed, first = self.norm(x), 1 + self.num_register_tokens
        return {
            "x_norm_clstoken": normed[:, 0],
            "x_norm_regtokens": normed[:, 1:first],
            "x_norm_patchtokens": normed[:, first:],
            "x_prenorm": x,
        }

    def forward(self, x: Tensor, is_training: bool = False) -> Tensor | dict[str, Tensor]:
        found = self.forward_features(x)
        return found if is_training else self.head(found["x_norm_clstoken"])
