"""The mask by which modules recognize padding."""

import torch
from torch import Tensor

from sinkwise.errors import InputError


def check_real(real: Tensor, x: Tensor) -> None:
    """Raise InputError unless `real` is a bool [batch token] for the tokens of `x`."""
    if real.dtype != torch.bool or real.shape != x.shape[:2]:
        raise InputError(
            f"real, {real.dtype} {tuple(real.shape)}, must be bool {tuple(x.shape[:2])}: True for "
            "tokens, False for padding"
        )
