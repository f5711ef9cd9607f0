"""Conformance: does what sinkwise captures from a model hold for that model?

    from sinkwise.conformance import check_model
    check_model(model, inputs)

As scikit-learn's `check_estimator`: a list of named checks, each of which can be run alone.
"""

from sinkwise.conformance.check import CHECKS, Check, CheckResult, check_model
from sinkwise.conformance.sample import ConformanceError, Sample, Skip, observe

__all__ = [
    "CHECKS",
    "Check",
    "CheckResult",
    "ConformanceError",
    "Sample",
    "Skip",
    "check_model",
    "observe",
]
