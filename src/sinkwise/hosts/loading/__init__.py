"""Models by name: transformers, timm, open_clip, torch.hub, PyPI wheels, local folders."""
