"""How a check ends if it does not pass."""

from sinkwise.errors import SinkwiseError


class ConformanceError(SinkwiseError, AssertionError):
    """A capture does not agree with the model."""


class Skip(Exception):
    """A check does not apply to a model, for the reason given."""
