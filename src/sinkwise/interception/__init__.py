"""Attention calls recognised in a running model: one adapter per form of call."""
