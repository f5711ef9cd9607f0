"""Endless text: the sink cache and what runs on it."""
