"""`SinkLogits`: a logit a head in the denominator of the softmax of every attention layer."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sinkwise.errors import InputError
from sinkwise.hosts.implementation import kernels_of, owned_sink
from sinkwise.mitigations.base import Child, Mitigation, Part
from sinkwise.mitigations.forward_override import Inside, Watched, watch
from sinkwise.mitigations.sink_softmax import Denominator
from sinkwise.mitigations.targets import attention_layers

SinkSoftmax = Literal["learnable", "off-by-one"]

CHILD = "sink_logits"
"""The name of the logits in the attention module."""


@dataclass(frozen=True)
class SinkLogits(Mitigation):
    """A_ij = exp(s_ij) / (exp(b_h) + sum_j exp(s_ij)): one logit b_h a head, without a value.

    A head's weights sum to less than 1 and b_h takes the rest, so that a head with nothing to add
    can write nothing, and needs no token whose value is near zero. `softmax="learnable"` learns
    b_h, from `init` on; `"off-by-one"` fixes it at 0 and adds no parameter.

    No start leaves a model exactly as it is: the sink takes sigmoid(b_h - lse) of a query's
    attention, lse = log sum_j exp(s_ij), and the gradient of b_h is as small as that share. With
    init=-20 the outputs of models at random weights stay within 1e-6 in float32. A trained head's
    scores may all lie far below 0, which a plain softmax does not see: SmolLM2-135M has queries
    with lse = -14 and DINOv2-S with -19, and move by 1.6e-5 and 5e-4 of their outputs' norm; -40
    changes no bit of either, and trains as good as never. With init=0, the start for training from
    scratch (gpt-oss), a trained model's outputs change at once. A query without keys, as a row of
    padding may be, gets 0 from its layer whatever the logit.

    SDPA and eager softmax agree. All options of the attention call are kept: masks, causal order,
    scale, dropout, grouped heads, caches. Attention outside of the blocks whose layout is unknown
    (timm's pooling) has no logits.

    Raises InputError for another softmax, an `init` that is not finite, or one beside
    "off-by-one"; on application, for a model that has sink logits already (gpt-oss and its kin), is
    set to a kernel that is neither SDPA nor eager, or attends in an unknown way; and where a layer
    then runs without exactly one softmax that the logits could join (FlexAttention, flash-attn).

    Reference: OpenAI, 2025, gpt-oss, arXiv 2508.10925; off-by-one: Miller, 2023, "Attention is off
    by one" (no arXiv id).
    """

    softmax: SinkSoftmax = "learnable"
    """`learnable`: a parameter a head; `off-by-one`: the logit stays at 0."""
    init: float = 0.0
    """The logits at the start; 0 for `off-by-one`."""

    name: ClassVar[str] = "sink_logits"

    def __post_init__(self) -> None:
        if self.softmax not in get_args(SinkSoftmax):
            known = ", ".join(get_args(SinkSoftmax))
            raise InputError(f"softmax={self.softmax!r} is none of {known}")
        if not -float("inf") < self.init < float("inf"):
            raise InputError(
                f"init={self.init} must be finite: a logit at -inf never gets a gradient"
            )
        if self.softmax == "off-by-one" and self.init != 0:
            raise InputError(f"init={self.init} is for softmax='learnable'; off-by-one has 0")

    def apply(self, model: nn.Module, generator: torch.Generator, parts: list[Part]) -> None:
        kind = type(model).__name__
        for kernel in kernels_of(model):
            if kernel not in ("eager", "sdpa"):
                raise InputError(
                    f"no sink logits fit {kind}: it runs attn_implementation={kernel!r}, which "
                    "they cannot join; call model.set_attn_implementation('sdpa') first"
                )
        layers = []
        for path, attention, site in attention_layers(model, CHILD, "no sink logits fit"):
            own = None if site.q is None else owned_sink(attention, site.q.shape[0])
            if site.q is None or own is not None:
                why = "unknown heads" if own is None else f"sink logits of its own, {own!r}"
                raise InputError(f"no sink logits fit {path!r}: it has {why}")
            layers.append((path, attention, site.q))
        for path, attention, q in layers:
            logits = HeadLogits(q.shape[0], self.softmax, self.init)
            logits.to(device=q.device, dtype=q.dtype)
            if not logits.logit.isfinite().all():
                raise InputError(f"init={self.init} is not finite in {path!r}'s {q.dtype}")
            parts.append(Child(attention, CHILD, logits))
            watch(_WithLogits(path, attention, logits), parts)


class HeadLogits(nn.Module):
    """`logit` [head]: learned, or fixed at 0 and then no part of the state."""

    logit: Float[Tensor, " head"]

    def __init__(self, heads: int, softmax: SinkSoftmax, init: float) -> None:
        super().__init__()
        self._softmax = softmax
        logit = torch.full((heads,), float(init))
        if softmax == "learnable":
            self.logit = nn.Parameter(logit)
        else:
            self.register_buffer("logit", logit, persistent=False)

    def extra_repr(self) -> str:
        """What the weights do not tell: a scan's checksum is made of this line too."""
        return f"{len(self.logit)}, softmax={self._softmax!r}"


class _WithLogits(Watched):
    """An attention layer's forward with the logits in its softmax."""

    def __init__(self, path: str, attention: nn.Module, logits: HeadLogits) -> None:
        super().__init__(path, attention)
        self._logits = logits

    def mode(self, args: tuple, kwargs: dict[str, Any]) -> Inside:
        return Denominator(self.path, self._logits.logit)
