"""Endless text: the sink cache, and scoring and generation with it."""
