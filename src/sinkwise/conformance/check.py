"""`check_model`: all checks on one model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from sinkwise.conformance import calls, causality, traces, weights
from sinkwise.conformance.errors import ConformanceError, Skip
from sinkwise.conformance.observation import Observation, observe
from sinkwise.errors import InputError
from sinkwise.hosts.inputs import batch_size

Check = Callable[[Observation], str | None]
"""Raises ConformanceError if it fails and Skip if it does not apply; may return a note."""

CHECKS: tuple[Check, ...] = (
    calls.check_output_is_unchanged,
    calls.check_record_gives_the_output,
    calls.check_shapes,
    calls.check_probabilities,
    causality.check_causality,
    weights.check_values_per_kv_head,
    weights.check_output_projection,
    calls.check_layers,
    traces.check_no_trace,
    traces.check_no_trace_after_a_failing_callback,
    traces.check_no_trace_after_a_failing_model,
)
"""All checks, in order."""


@dataclass(frozen=True)
class CheckResult:
    """The result of one check."""

    check: str
    """Name of the check."""
    status: Literal["passed", "failed", "skipped"]
    message: str = ""
    """Why it failed or was skipped, or a note."""


def check_model(
    model: nn.Module,
    inputs: Any,
    *,
    on_fail: str = "raise",
    checks: tuple[Check, ...] = CHECKS,
) -> list[CheckResult]:
    """Check that what sinkwise captures from `model` agrees with the model, on your own inputs.

    `inputs` are a tensor, a tuple or a dict. The model runs about ten times in eval mode, and every
    record is kept and recomputed in float64: use small inputs. Returns one result per check.

    Raises ConformanceError at the first failed check, unless `on_fail="report"`; CaptureError if
    nothing can be captured; InputError for an unknown `on_fail`, and for inputs or outputs without
    a tensor.
    """
    if on_fail not in ("raise", "report"):
        raise InputError(f"on_fail={on_fail!r} must be 'raise' or 'report'")
    batch_size(inputs)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        observed = observe(model, inputs)
        return [_result(check, observed, on_fail) for check in checks]
    finally:
        for module, mode in modes:
            module.training = mode


def _result(check: Check, observed: Observation, on_fail: str) -> CheckResult:
    name = check.__name__.removeprefix("check_")
    try:
        return CheckResult(name, "passed", check(observed) or "")
    except Skip as reason:
        return CheckResult(name, "skipped", str(reason))
    except ConformanceError as error:
        if on_fail == "raise":
            kind = type(observed.model).__name__
            raise ConformanceError(f"{kind}: {name}: {error}") from error
        return CheckResult(name, "failed", str(error))
