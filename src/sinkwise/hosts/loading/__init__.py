"""Models by name: transformers, timm, open_clip, hub code, PyPI wheels, local folders."""
