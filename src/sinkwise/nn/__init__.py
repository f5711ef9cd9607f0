"""Modules and masks for training."""
