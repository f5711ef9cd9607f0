"""Errors that a user can cause: one line with the argument, what was given and what is needed."""


class SinkwiseError(Exception):
    """Base of the errors that sinkwise raises on purpose; the command line exits with code 2."""


class InputError(SinkwiseError, ValueError):
    """An argument, file or model that cannot be used."""


class CaptureError(SinkwiseError, RuntimeError):
    """Attention could not be captured, or a record does not reproduce the model's own output."""
