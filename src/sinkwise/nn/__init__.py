"""Modules and masks for training: the output gate, registers, a sink token."""
