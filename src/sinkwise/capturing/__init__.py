"""Capture a model's attention: a callback for each call, while the model runs on unchanged."""
