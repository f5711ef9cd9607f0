"""Rank of a head's update U = A v W_O^T from small Gram matrices, without an N x dim matrix."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinkwise.attention.tiles import statistics_dtype


class UpdateSpectrum(NamedTuple):
    """The two moments of an update's spectrum that its ranks are computed from."""

    energy: Float[Tensor, " event"]
    """Squared Frobenius norm, the sum of the squared singular values."""
    top: Float[Tensor, " event"]
    """The largest squared singular value."""

    @property
    def stable_rank(self) -> Float[Tensor, " event"]:
        """energy / top, 1 or more; 1 if all tokens get one direction. NaN for a zero update."""
        return self.energy / self.top

    @property
    def rank_one_energy(self) -> Float[Tensor, " event"]:
        """top / energy, the share of the energy in one direction, 0 to 1. NaN for a zero update."""
        return self.top / self.energy


def output_root(
    o: Float[Tensor, "head out_dim value_dim"],
    layer_scale: Float[Tensor, " out_dim"] | None = None,
) -> Float[Tensor, "head value_dim value_dim"]:
    """R with R^T R = W_O^T diag(layer_scale)^2 W_O, so that |R v| = |layer_scale * W_O v|.

    R is the triangular factor of a QR decomposition in float64, which keeps the digits of small
    singular values.
    """
    weight = o.detach().to(torch.float64)
    if layer_scale is not None:
        weight = weight * layer_scale.detach().to(torch.float64)[:, None]
    root = torch.linalg.qr(weight, mode="r").R
    width = o.shape[2]
    if root.shape[1] < width:
        root = torch.nn.functional.pad(root, (0, 0, 0, width - root.shape[1]))
    return root.to(statistics_dtype(o))


def update_spectrum(
    out: Float[Tensor, "event query value_dim"],
    root: Float[Tensor, "event value_dim value_dim"],
    counted: Bool[Tensor, "event query"] | None = None,
) -> UpdateSpectrum:
    """Energy and top squared singular value of U = out R^T over the counted queries.

    With G = out^T out: |U|_F^2 = tr(R G R^T) and sigma_1^2 = lambda_max(R G R^T).
    """
    dtype = statistics_dtype(out)
    rows = out.to(dtype)
    if counted is not None:
        rows = rows.masked_fill(~counted[..., None], 0.0)
    gram = root.to(dtype) @ (rows.mT @ rows) @ root.to(dtype).mT
    gram = gram.to(torch.float64)
    finite = torch.isfinite(gram).all(dim=-1).all(dim=-1)
    values = torch.linalg.eigvalsh(gram.masked_fill(~finite[:, None, None], 0.0))
    energy = gram.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
    top = values[:, -1].clamp_min(0.0).masked_fill(~finite, torch.nan)
    return UpdateSpectrum(energy.to(dtype), torch.minimum(top, energy).to(dtype))
