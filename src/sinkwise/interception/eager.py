"""Adapter for eager attention: a product, a softmax of it, and a product of the result."""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from sinkwise.core.records import OPEN, AttentionMask
from sinkwise.interception import matmul, shapes
from sinkwise.interception.intercepted import Deferral, Description, Intercepted, Rescaled
from sinkwise.interception.lse_trace import LseTrace
from sinkwise.interception.score_trace import ScoreTrace
from sinkwise.interception.scores import Scores, Weights


class EagerAttention:
    """Runs the torch functions of a model and recognises the attention that they make up.

    `weights` are the storages (`matmul.storage`) of the model's parameters: a product with one is
    a linear map, never a score.
    """

    def __init__(self, lse: LseTrace, weights: set[int]) -> None:
        self._trace = ScoreTrace()
        self._lse = lse
        self._weights = weights

    def intercept(
        self, func: Callable, name: str, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[Any, Description | None]:
        """Run any torch function; a description where it completes an attention call."""
        self._lse.before(name, args, kwargs)
        if name == "__setitem__":
            self._trace.overwritten(args[0])
        product = matmul.product(name, args, kwargs)
        result = func(*args, **kwargs)
        self._lse.after(name, args, kwargs, result)
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return result, None
        if product is not None:
            return result, self._multiplied(product, result)
        self._trace.follow(name, args, kwargs, result)
        scores = self._trace.summed(name, args, kwargs)
        if scores is not None:
            self._lse.track(result, scores)
        return result, None

    def clear(self) -> None:
        """Forget every tensor."""
        self._trace.tags.clear()

    def _multiplied(self, product: matmul.Product, result: Tensor) -> Description | None:
        """A product consumes an attention map, or may be the first step towards one."""
        for side, operand in enumerate(product.operands):
            tag = self._trace.tags.get(operand)
            key_first = side == 1
            if isinstance(tag, Weights) and tag.has_layout(product.axes[side], key_first=key_first):
                parts = product.left, product.right, product.laid_out(result)
                if key_first:  # (A v)^T = v^T A^T
                    parts = product.right.mT, product.left.mT, parts[2].mT
                return functools.partial(self._describe, tag, *parts)
        if matmul.storage(product.right) not in self._weights:
            self._trace.tags[result] = Scores(
                product.left,
                product.right.mT,
                scale=product.alpha,
                bias=product.bias,
                order=product.result_order,
            )
        return None

    def _describe(
        self, tag: Weights, weights: Tensor, value: Tensor, out: Tensor, owner: nn.Module | None
    ) -> Intercepted | None:
        """The fields of the call out = weights value; None where the traced queries and keys do
        not fit the map, which then is of something else.
        """
        scores = tag.scores
        lead = shapes.batch_and_heads(tag.lead, owner)
        four = functools.partial(shapes.with_lead, lead=lead)
        q, k, v = four(scores.q), four(scores.k), four(value)
        if weights.shape[-2:] != (q.shape[2], k.shape[2]) or k.shape[2] != v.shape[2]:
            return None
        mask = OPEN
        if scores.bias is not None:
            mask = AttentionMask(additive=shapes.bias_with_lead(scores.bias, lead))

        def per_query(sink: Tensor) -> Tensor:
            return sink.expand(*tag.lead, weights.shape[-2]).reshape(*lead, -1)

        def rescaled(to: Rescaled) -> dict[str, Any]:
            sink, share = (t.reshape(*tag.lead, -1) for t in (to.sink, to.share))
            return {
                "out": four(to.out),
                "sink_logit": per_query(sink),
                "weights": four(weights * share[..., None]),
            }

        fields = {
            "q": q,
            "k": k,
            "v": v,
            "out": four(out),
            "scale": scores.scale,
            "softcap": scores.softcap,
            "mask": mask,
            "sink_logit": None if scores.sink is None else per_query(scores.sink),
            "weights": four(weights),
            "faithful": scores.faithful and tag.faithful,
        }
        deferral = Deferral(scores, out, rescaled) if self._lse.tracks(scores) else None
        return Intercepted(fields, has_dropout=tag.dropped, deferral=deferral)
