"""ALiBi: a bias on the scores that grows with the distance, by cache position.

The bias of each cache position comes from the model's own function and is rounded as the model
rounds it. It is passed together with the mask; the model's own bias, which counts slots, is
replaced by zeros.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sinkwise.streaming.plan import Plan


@dataclass(frozen=True, eq=False)
class Bias:
    """How a model family takes its position bias."""

    table: Callable[[int], Float[Tensor, "head position"]]
    """The bias of each position in a cache of that capacity."""
    argument: str
    """The attention module's argument for it."""
    in_mask: bool
    """Whether the mask is added to the scores and can include the bias."""

    def arguments(self, plan: Plan, table: Tensor, dtype: torch.dtype) -> dict[str, Any]:
        """The mask and bias that attention modules get instead of the model's own."""
        table = table.to(dtype) if self.in_mask else table
        bias = table[:, plan.positions].transpose(0, 1)  # batch, head, query, column
        batch, heads, length, columns = bias.shape
        hidden = ~plan.visible[:, None]
        if self.in_mask:
            mask = bias.masked_fill(hidden, torch.finfo(dtype).min)
            zeros = torch.zeros(batch * heads, 1, columns, dtype=dtype)
            return {"attention_mask": mask, self.argument: zeros}
        # Without a batch axis: one block of columns per row; the other rows' blocks are masked.
        if plan.tokens.uniform or batch == 1:
            return {"attention_mask": hidden, self.argument: bias[0]}
        whole = torch.ones(batch, 1, length, batch, columns, dtype=torch.bool)
        for row in range(batch):
            whole[row, :, :, row] = hidden[row]
        bias = bias.permute(1, 2, 0, 3).flatten(2)
        return {"attention_mask": whole.flatten(3), self.argument: bias}

    def blocks(self, plan: Plan) -> int:
        """How many times the keys must be repeated along the columns."""
        return 1 if self.in_mask or plan.tokens.uniform else len(plan.tokens.seen)


def bias_of(base: nn.Module) -> Bias | None:
    """The model's ALiBi; None if it has none."""
    config: Any = base.config
    kind = getattr(config, "model_type", "")
    if kind == "bloom":
        from transformers.models.bloom.modeling_bloom import build_alibi_tensor

        heads = config.n_head
        return Bias(
            lambda length: build_alibi_tensor(_ones(length), heads, torch.float32)[:, 0],
            "alibi",
            in_mask=True,
        )
    if kind == "falcon" and config.alibi:
        return Bias(lambda length: _falcon(config, length), "alibi", in_mask=True)
    if kind == "mpt":  # transformers builds the bias whatever attn_config.alibi says
        from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

        heads = config.n_heads
        return Bias(
            lambda length: build_mpt_alibi_tensor(heads, length)[:, 0],
            "position_bias",
            in_mask=False,
        )
    return None


def _ones(length: int) -> Tensor:
    return torch.ones(1, length, dtype=torch.int64)


def _falcon(config: Any, length: int) -> Float[Tensor, "head position"]:
    """Falcon's bias, scaled as its scores are.

    Its eager attention adds the bias itself and once more as a part of its mask.
    """
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    heads = config.num_attention_heads
    bias = build_alibi_tensor(_ones(length), heads, torch.float32)[:, 0]
    times = 2 if config._attn_implementation == "eager" else 1
    return times * bias / math.sqrt(config.hidden_size // heads)
