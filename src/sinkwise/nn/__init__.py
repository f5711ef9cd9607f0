"""Modules that answer sinks: gates, registers, sink logits, a pathway for what all are told."""
