"""A call in progress: the plans of its layers, its positions, and the rotations of the sinks."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkwise.attention.rotary import Rotary
from sinkwise.core.retention import Retention
from sinkwise.streaming.plan import Plan, Tokens
from sinkwise.streaming.positions.alibi import Bias


@dataclass(eq=False)
class CacheCall:
    """One forward call of a decoder with a sink cache, short enough for one plan."""

    tokens: Tokens
    retention: Retention
    """What the layers with sinks keep."""
    base: tuple[int, ...]
    """Each row's token index minus its rotary position."""
    others: frozenset[Retention] = frozenset()
    """What layers with their own window keep."""
    tables: dict[Any, Any] = field(default_factory=dict)
    """Plans, cosines, sines and masks, computed once per call."""

    def plan(self, retention: Retention) -> Plan:
        """The plan of the layers with that retention."""
        if retention not in self.tables:
            self.tables[retention] = Plan(self.tokens, retention)
        return self.tables[retention]

    @property
    def needs_mask(self) -> bool:
        """Whether attention modules must get another mask than the model's own."""
        if self.steps is not None:
            return False
        kinds = {self.retention, *self.others}
        return any(self.plan(retention).mask is not None for retention in kinds)

    @cached_property
    def steps(self) -> dict[Retention, tuple[int, int]] | None:
        """The new token's slot and the number of columns, by retention; None if this is not a
        call of one token per row, in which all rows are at the same token and have their sinks.
        """
        seen = self.tokens.seen[0]
        if self.tokens.length > 1 or not self.uniform or seen <= self.retention.num_sink_tokens:
            return None
        return {kept: kept.step(seen) for kept in (self.retention, *self.others)}

    def columns(self, retention: Retention) -> int:
        """Number of keys that attention gets in layers of that retention."""
        return self.plan(retention).columns if self.steps is None else self.steps[retention][1]

    @cached_property
    def past(self) -> int:
        """Number of keys before the call's own, as the model's masks count them."""
        kinds = {self.retention, *self.others}
        return max(self.columns(retention) for retention in kinds) - self.tokens.length

    @cached_property
    def uniform(self) -> bool:
        """Whether the positions are the same in all rows."""
        return self.tokens.uniform and len(set(self.base)) == 1

    def positions(self) -> Int[Tensor, "row query"]:
        """Rotary positions: token index minus base; one row if all rows are alike."""
        if self.uniform:
            first = self.tokens.seen[0] - self.base[0]
            if self.tokens.length == 1:
                return torch.full((1, 1), first)
            return torch.arange(first, first + self.tokens.length)[None]
        return self.tokens.index - torch.tensor(self.base)[:, None]

    def rotation(
        self, rotary: Rotary | None, like: Tensor
    ) -> tuple[Float[Tensor, "row 1 query rotated"], Float[Tensor, "row 1 query rotated"]] | None:
        """Cosines and sines that re-rotate the sinks for each query, so that their distance to it
        is that of their cache positions.
        """
        if rotary is None:
            return None
        working = torch.promote_types(like.dtype, torch.float32)
        key = (rotary, like.device, working)
        if key not in self.tables:
            shift = (self.positions() - (self.retention.capacity - 1)).clamp(min=0)
            angles = rotary.angles(shift)[:, None]
            made = [part.to(like.device, working) for part in (angles.cos(), angles.sin())]
            self.tables[key] = made[0], made[1]
        return self.tables[key]

    def arguments(self, retention: Retention, bias: Bias | None, like: Tensor) -> dict[str, Tensor]:
        """The arguments that attention modules of that retention get instead of the model's own."""
        key = ("arguments", retention, like.device)
        if key not in self.tables:
            self.tables[key] = self._arguments(self.plan(retention), bias, like)
        return self.tables[key]

    def _arguments(self, plan: Plan, bias: Bias | None, like: Tensor) -> dict[str, Tensor]:
        if bias is not None:
            if bias not in self.tables:
                self.tables[bias] = bias.table(self.retention.capacity)
            given = bias.arguments(plan, self.tables[bias], like.dtype)
            return {name: value.to(like.device) for name, value in given.items()}
        if plan.mask is None:
            return {}
        lowest = torch.finfo(like.dtype).min
        mask = torch.zeros(plan.mask.shape, dtype=like.dtype).masked_fill(~plan.mask, lowest)
        return {"attention_mask": mask[:, None].to(like.device)}
