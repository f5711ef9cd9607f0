"""Modules and parameters by the names that DINOv3's own repository gives them."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DIM, HEADS, PATCH = 40, 5, 8
Rope = tuple[Tensor, Tensor]


class LinearKMaskedBias(nn.Linear):
    """A projection whose key bias is masked, by NaN until weights are loaded."""

    def __init__(self, *given: int) -> None:
        super().__init__(*given)
        self.register_buffer("bias_mask", torch.full_like(self.bias.detach(), math.nan))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias * self.bias_mask)


class SelfAttention(nn.Module):
    """One projection [(q k v), head, head_dim], rotary positions for the patches."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.proj = LinearKMaskedBias(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, attn_bias: Tensor | None = None, rope: Rope | None = None):
        batch, tokens, dim = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, dim // self.num_heads)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        if rope is not None:
            q, k = rotated(q, *rope), rotated(k, *rope)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).reshape(batch, tokens, dim))


def rotated(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """Rotary positions for the patches, not for the tokens before them."""
    prefix, patches = x[:, :, : -sin.shape[0]], x[:, :, -sin.shape[0] :]
    one, two = patches.chunk(2, dim=-1)
    return torch.cat([prefix, patches * cos + torch.cat([-two, one], dim=-1) * sin], dim=2)


class LayerScale(nn.Module):
    """A learned factor per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((DIM,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class SelfAttentionBlock(nn.Module):
    """A pre-norm block over a list of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM, eps=1e-5), nn.LayerNorm(DIM, eps=1e-5)
        self.attn, self.ls1, self.ls2 = SelfAttention(), LayerScale(), LayerScale()
        self.mlp = nn.Sequential(nn.Linear(DIM, 53), nn.GELU(), nn.Linear(53, DIM))

    def forward(self, x_or_x_list: list[Tensor], rope_or_rope_list: list[Rope]) -> list[Tensor]:
        out = []
        for x, rope in zip(x_or_x_list, rope_or_rope_list, strict=True):
            x = x + self.ls1(self.attn(self.norm1(x), rope=rope))
            out.append(x + self.ls2(self.mlp(self.norm2(x))))
        return out


class PatchEmbed(nn.Module):
    """Patches on their grid."""

    def __init__(self) -> None:
        super().__init__()
        self.img_size, self.patch_size = (24, 24), (PATCH, PATCH)
        self.proj = nn.Conv2d(3, DIM, PATCH, PATCH)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).permute(0, 2, 3, 1)


class DinoVisionTransformer(nn.Module):
    """Class token, storage tokens, patches."""

    def __init__(self, n_storage_tokens: int = 2) -> None:
        super().__init__()
        self.patch_embed, self.n_storage_tokens = PatchEmbed(), n_storage_tokens
        self.cls_token = nn.Parameter(torch.randn(1, 1, DIM))
        self.storage_tokens = nn.Parameter(torch.randn(1, n_storage_tokens, DIM))
        self.mask_token = nn.Parameter(torch.zeros(1, DIM))
        self.blocks = nn.ModuleList([SelfAttentionBlock() for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(DIM, eps=1e-5), nn.Identity()

    def load_masks(self) -> None:
        """What a checkpoint sets: no bias for the keys."""
        for block in self.blocks:
            block.attn.qkv.bias_mask.fill_(1.0)
            block.attn.qkv.bias_mask[DIM : 2 * DIM] = 0.0

    def rope(self, rows: int, cols: int) -> Rope:
        y, x = torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij")
        speed = 2.0 ** -torch.arange(DIM // HEADS // 4)
        angles = torch.cat([y.reshape(-1, 1) * speed, x.reshape(-1, 1) * speed], dim=-1)
        return angles.repeat(1, 2).sin(), angles.repeat(1, 2).cos()

    def forward_features(self, x: Tensor) -> dict[str, Tensor]:
        patches = self.patch_embed(x)
        rope = self.rope(*patches.shape[1:3])
        prefix = [t.expand(len(x), -1, -1) for t in (self.cls_token, self.storage_tokens)]
        tokens = [torch.cat([*prefix, patches.flatten(1, 2)], dim=1)]
        for block in self.blocks:
            tokens = block(tokens, [rope])
        normed, first = self.norm(tokens[0]), 1 + self.n_storage_tokens
        return {
            "x_norm_clstoken": normed[:, 0],
            "x_storage_tokens": normed[:, 1:first],
            "x_norm_patchtokens": normed[:, first:],
            "x_prenorm": tokens[0],
        }

    def forward(self, x: Tensor, is_training: bool = False) -> Tensor | dict[str, Tensor]:
        found = self.forward_features(x)
        return found if is_training else self.head(found["x_norm_clstoken"])
