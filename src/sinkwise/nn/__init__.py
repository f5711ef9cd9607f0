"""Modules that answer sinks: an output gate on the heads, register tokens before the sequence."""
