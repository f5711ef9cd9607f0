"""Modules that answer sinks: gates, registers, sink logits and tokens, a global pathway, masks."""
