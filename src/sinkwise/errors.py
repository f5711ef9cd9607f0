"""Errors a user can cause, each a clear line that names the argument and what would be right."""


class SinkwiseError(Exception):
    """Base of the errors that sinkwise raises on purpose; the command line exits with 2."""


class InputError(SinkwiseError, ValueError):
    """An argument, file or model that cannot be used."""


class CaptureError(SinkwiseError, RuntimeError):
    """Attention could not be captured, or a record does not reproduce the model's own output."""
