"""The softmax of an attention layer, with exp(logit) in each head's denominator."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from sinkwise.errors import InputError
from sinkwise.mitigations.forward_override import LayerMode
from sinkwise.nn.sink_logit import sink_attention


class SinkSoftmaxMode(LayerMode):
    """Adds `logit` to the one softmax of a call, fused or over a map of scores.

    `F.scaled_dot_product_attention` becomes `sink_attention` with the same options. A softmax over
    the keys of [batch head query key], or [batch*head query key], gets one more column, which is
    dropped afterwards: a form that a capture recognizes.
    """

    def __init__(self, path: str, logit: Float[Tensor, " head"]) -> None:
        super().__init__()
        self._path, self._logit = path, logit
        self._count = 0

    def intercept(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        if func is F.scaled_dot_product_attention:
            self._count += 1
            return self._fused(*args, **kwargs)
        if getattr(func, "__name__", "") == "softmax":
            return self._eager(func, *args, **kwargs)
        return func(*args, **kwargs)

    def finish(self) -> None:
        if self._count != 1:
            raise InputError(
                f"{self._path!r} ran {self._count} softmaxes that its sink logits can join, and "
                "needs exactly one: F.scaled_dot_product_attention, or softmax over the last axis "
                "of [batch head query key]; try model.set_attn_implementation('sdpa')"
            )

    def _fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        heads, shape = len(self._logit), query.shape
        group = heads // shape[1] if len(shape) == 4 else 0
        # For a single token, transformers passes the heads of a group as queries of one head.
        packed = group > 1 and shape[1:3] == (heads // group, group) and key.shape[1] == shape[1]
        if len(shape) != 4 or not (packed or shape[1] == heads):
            raise InputError(
                f"the attention of {self._path!r} has queries {list(shape)}; its sink logits need "
                f"[batch, {heads}, query, head_dim]"
            )
        if is_causal and attn_mask is None and shape[2] != key.shape[2]:
            rows, columns = shape[2], key.shape[2]
            is_causal, attn_mask = False, _first_keys(rows, columns, query.device)
        if attn_mask is not None:
            attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
        if packed:
            query = query.flatten(1, 2).unsqueeze(2)
            if attn_mask is not None:
                attn_mask = attn_mask.expand(-1, *shape[1:3], -1).flatten(1, 2).unsqueeze(2)
        if query.shape[0] == 1:  # learned queries, the same for every sample
            query = query.expand(key.shape[0], -1, -1, -1)
        out = sink_attention(
            query,
            key,
            value,
            self._logit,
            attn_mask=attn_mask,
            is_causal=is_causal,
            scale=scale,
            dropout_p=dropout_p,
        )
        return out.unflatten(1, shape[1:3]).squeeze(3) if packed else out

    def _eager(self, func: Callable, *args: Any, **kwargs: Any) -> Tensor:
        """A softmax, called as F.softmax, torch.softmax or a method of the scores."""
        scores = kwargs["input"] if "input" in kwargs else args[0]
        given = args if "input" in kwargs else args[1:]
        dim = kwargs.get("dim", given[0] if given else None)
        heads, count = len(self._logit), scores.dim()
        is_map = count == 4 and scores.shape[1] == heads
        is_map |= count == 3 and scores.shape[0] % heads == 0
        if not is_map or dim not in (-1, count - 1):
            return func(*args, **kwargs)
        self._count += 1
        if (
            kwargs.get("dtype") is not None
        ):  # before the logit is rounded to the dtype of the scores
            scores = scores.to(kwargs["dtype"])
        logit = self._logit.to(scores.dtype)
        if count == 3:
            logit = logit.repeat(scores.shape[0] // heads)
        column = logit[:, None, None].expand(*scores.shape[:-1], 1)
        joint = torch.cat([scores, column], dim=-1)
        if "input" in kwargs:
            kwargs = {**kwargs, "input": joint}
        else:
            args = (joint, *given)
        return func(*args, **kwargs)[..., :-1]


def _first_keys(queries: int, keys: int, device: torch.device) -> Bool[Tensor, "query key"]:
    """What is_causal=True means in torch if there are more keys: query i sees keys 0 to i."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril()
