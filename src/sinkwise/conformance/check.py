"""`check_model`: all checks, run on one model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from sinkwise.conformance import calls, traces
from sinkwise.conformance.sample import ConformanceError, Sample, Skip, observe
from sinkwise.errors import InputError
from sinkwise.hosts.inputs import batch_size

Check = Callable[[Sample], str | None]
"""Raises ConformanceError where the model fails it, Skip where it does not apply; what it returns
is a note."""

CHECKS: tuple[Check, ...] = (
    calls.check_output_is_unchanged,
    calls.check_record_gives_the_output,
    calls.check_shapes,
    calls.check_probabilities,
    calls.check_causality,
    calls.check_values_per_kv_head,
    calls.check_output_projection,
    calls.check_layers,
    traces.check_no_trace,
    traces.check_no_trace_after_a_failing_callback,
    traces.check_no_trace_after_a_failing_model,
)
"""All checks, in the order in which they run."""


@dataclass(frozen=True)
class CheckResult:
    """One check of one model."""

    check: str
    status: Literal["passed", "failed", "skipped"]
    message: str = ""


def check_model(
    model: nn.Module,
    inputs: Any,
    *,
    on_fail: str = "raise",
    checks: tuple[Check, ...] = CHECKS,
) -> list[CheckResult]:
    """Check what sinkwise captures from `model`, run on `inputs` (a tensor, tuple or dict).

    The model runs some ten times in eval mode, every record of a pass is kept, and each is
    recomputed in float64: use small inputs. Raises ConformanceError at the first failed check, or
    with `on_fail="report"` returns one result a check; CaptureError where nothing can be captured.
    """
    if on_fail not in ("raise", "report"):
        raise InputError(f"on_fail={on_fail!r}; it is 'raise' or 'report'")
    batch_size(inputs)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        sample = observe(model, inputs)
        return [_outcome(check, sample, on_fail) for check in checks]
    finally:
        for module, mode in modes:
            module.training = mode


def _outcome(check: Check, sample: Sample, on_fail: str) -> CheckResult:
    name = check.__name__.removeprefix("check_")
    try:
        return CheckResult(name, "passed", check(sample) or "")
    except Skip as reason:
        return CheckResult(name, "skipped", str(reason))
    except ConformanceError as error:
        if on_fail == "raise":
            kind = type(sample.model).__name__
            raise ConformanceError(f"{kind}: {name}: {error}") from error
        return CheckResult(name, "failed", str(error))
