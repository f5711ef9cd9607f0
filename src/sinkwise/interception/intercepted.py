"""What an adapter makes of one attention call: the fields of its record, and how to complete it.

An adapter is a function of one file of this package: it runs a call and returns the call's own
result together with a description. The description is evaluated with the module that attends.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn


class Rescaled(NamedTuple):
    """A call's output after the model multiplied it by the share that a sink logit leaves."""

    out: Tensor
    share: Tensor
    """sigmoid(lse - sink): what is left to the keys, per query."""
    sink: Tensor
    """The sink logit, per query."""


@dataclass(frozen=True, eq=False)
class Deferral:
    """The record waits for the first use of the call's output, which may be its rescaling."""

    call: object
    """Identifies the call among the log-sum-exps that are traced."""
    out: Tensor
    rescaled: Callable[[Rescaled], dict[str, Any]]
    """The record's fields that change if the output is rescaled."""
    lse: Tensor | None = None
    """The log-sum-exp that the call returned; None where the model computes it itself."""
    lse_factor: float = 1.0
    """`lse` is this times the natural log-sum-exp."""


@dataclass(frozen=True, eq=False)
class Intercepted:
    """One attention call."""

    fields: dict[str, Any]
    """Fields of `AttentionRecord`: q, k, v, out, scale, mask and what else is known."""
    mask_tensor: Tensor | None = None
    """The mask as the model passed it: layers that share it share what is recognised in it."""
    has_dropout: bool = False
    """Whether dropout changed the map, so that the output cannot be recomputed."""
    deferral: Deferral | None = None


Description = Callable[[nn.Module | None], Intercepted | None]
"""Given the module that attends: the call, or None where it turns out to be no attention."""
Adapter = Callable[[Callable, tuple, dict[str, Any]], tuple[Any, Description]]
"""(function, args, kwargs) -> (what the function returned, the call's description)."""
