"""Conformance: does what sinkwise captures from a model agree with the model?

    from sinkwise.conformance import check_model
    check_model(model, inputs)

Like scikit-learn's `check_estimator`: a list of named checks, each of which can be run alone.
"""

from sinkwise.conformance.check import CHECKS, Check, CheckResult, check_model
from sinkwise.conformance.errors import ConformanceError, Skip
from sinkwise.conformance.observation import Observation, observe

__all__ = [
    "CHECKS",
    "Check",
    "CheckResult",
    "ConformanceError",
    "Observation",
    "Skip",
    "check_model",
    "observe",
]
