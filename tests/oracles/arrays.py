"""Conversion of what tests hold (torch tensors of any dtype) to numpy float64."""

import numpy as np


def array(x):
    """`x` as a numpy array: bool stays bool, everything else becomes float64 exactly."""
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        x = x.numpy() if str(x.dtype) == "torch.bool" else x.double().numpy()
    x = np.asarray(x)
    return x if x.dtype == bool else x.astype(np.float64)
