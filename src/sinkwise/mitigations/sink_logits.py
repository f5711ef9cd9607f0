"""`SinkLogits`: one logit per head in the softmax denominator of every attention layer."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sinkwise.errors import InputError
from sinkwise.hosts.implementation import attention_implementations, own_sink_logit
from sinkwise.mitigations.base import AddedModule, Insertion, Mitigation
from sinkwise.mitigations.forward_override import ForwardOverride, LayerMode, override_forward
from sinkwise.mitigations.sink_softmax import SinkSoftmaxMode
from sinkwise.mitigations.targets import attention_layers

SinkSoftmax = Literal["learnable", "off-by-one"]

SUBMODULE = "sink_logits"
"""The name of the logits in the attention module."""


@dataclass(frozen=True)
class SinkLogits(Mitigation):
    r"""One logit $b_h$ per head in the softmax's denominator, without a value.

    $$
    A_{ij} = \frac{e^{s_{ij}}}{e^{b_h} + \sum_k e^{s_{ik}}}
    $$

    A head's weights sum to less than 1 and $b_h$ takes the rest, so a head with nothing to add can
    write nothing, and needs no token whose value is near zero. `softmax="learnable"` learns $b_h$,
    starting at `init`; `"off-by-one"` fixes it at 0 and adds no parameter.

    No start leaves a model exactly unchanged: the sink takes $\sigma(b_h - \mathrm{lse})$ of a
    query's attention, with $\mathrm{lse} = \log \sum_j e^{s_{ij}}$, and the gradient of $b_h$ is
    as small as that share.

    - `init=0`, the start for training from scratch (gpt-oss), changes a trained model's outputs at
      once.
    - `init=-20` keeps the outputs of models at random weights within 1e-6 in float32. In trained
      heads all scores may be far below 0, which a plain softmax ignores: SmolLM2-135M has queries
      with lse = -14 and DINOv2-S with -19, and their outputs change by 1.6e-5 and 5e-4 of their
      norm.
    - `init=-40` changes no bit of either model, but hardly trains.

    SDPA and eager softmax agree. All options of the attention call are kept: masks, causal order,
    scale, dropout, grouped heads, caches. A query without keys, such as a padded one, gets an
    output of 0 whatever the logit. Attention outside the blocks with an unknown layout (timm's
    pooling) gets no logits.

    Raises InputError for an unknown softmax, an `init` that is not finite, or an `init` with
    "off-by-one". On application, raises InputError if the model has sink logits already (gpt-oss
    and its descendants), is set to an implementation other than SDPA or eager, or has unknown
    weights. A layer that then runs without exactly one softmax for its logits (FlexAttention,
    flash-attn) raises InputError too.

    Reference: OpenAI, 2025, gpt-oss, arXiv 2508.10925; off-by-one: Miller, 2023, "Attention is off
    by one" (no arXiv id).
    """

    softmax: SinkSoftmax = "learnable"
    """`learnable`: one parameter per head; `off-by-one`: the logit stays at 0."""
    init: float = 0.0
    """The logits at the start; 0 for `off-by-one`."""

    name: ClassVar[str] = "sink_logits"

    def __post_init__(self) -> None:
        if self.softmax not in get_args(SinkSoftmax):
            known = ", ".join(get_args(SinkSoftmax))
            raise InputError(f"softmax={self.softmax!r} is none of {known}")
        if not -float("inf") < self.init < float("inf"):
            raise InputError(
                f"init={self.init} must be finite: a logit of -inf never gets a gradient"
            )
        if self.softmax == "off-by-one" and self.init != 0:
            raise InputError(
                f"init={self.init} needs softmax='learnable'; with 'off-by-one' the logit is 0"
            )

    def apply(
        self, model: nn.Module, generator: torch.Generator, insertions: list[Insertion]
    ) -> None:
        kind = type(model).__name__
        for name in attention_implementations(model):
            if name not in ("eager", "sdpa"):
                raise InputError(
                    f"cannot add sink logits to {kind}: its attn_implementation={name!r} has no "
                    "softmax that they can join; call model.set_attn_implementation('sdpa') first"
                )
        layers = []
        for path, attention, site in attention_layers(
            model, SUBMODULE, "cannot add sink logits to"
        ):
            own = None if site.q is None else own_sink_logit(attention, site.q.shape[0])
            if site.q is None or own is not None:
                why = (
                    "an unknown number of heads" if own is None else f"its own sink logits, {own!r}"
                )
                raise InputError(f"cannot add sink logits to {path!r}: it has {why}")
            layers.append((path, attention, site.q))
        for path, attention, q in layers:
            logits = HeadLogits(q.shape[0], self.softmax, self.init, q.device).to(q.dtype)
            if not logits.logit.isfinite().all():
                raise InputError(
                    f"init={self.init} is not finite in {q.dtype}, the dtype of {path!r}"
                )
            insertions.append(AddedModule(attention, SUBMODULE, logits))
            override_forward(_WithLogits(path, attention, logits), insertions)


class HeadLogits(nn.Module):
    """`logit` [head]: a parameter, or fixed at 0 and not part of the state dict."""

    logit: Float[Tensor, " head"]

    def __init__(self, heads: int, softmax: SinkSoftmax, init: float, device: torch.device) -> None:
        super().__init__()
        self._softmax = softmax
        logit = torch.full((heads,), float(init), device=device)
        if softmax == "learnable":
            self.logit = nn.Parameter(logit)
        else:
            self.register_buffer("logit", logit, persistent=False)

    def extra_repr(self) -> str:
        """What the weights do not determine; a scan's fingerprint includes this line."""
        return f"{len(self.logit)}, softmax={self._softmax!r}"


class _WithLogits(ForwardOverride):
    """An attention layer's forward with the logits in its softmax."""

    def __init__(self, path: str, attention: nn.Module, logits: HeadLogits) -> None:
        super().__init__(path, attention)
        self._logits = logits

    def mode(self, args: tuple, kwargs: dict[str, Any]) -> LayerMode:
        return SinkSoftmaxMode(self.path, self._logits.logit)
