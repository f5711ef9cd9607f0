"""Readers of text and images."""
