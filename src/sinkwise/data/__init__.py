"""Readers of text and pictures."""
