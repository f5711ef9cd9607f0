"""A learned token before every sequence, to which heads attend when they have nothing to add."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sinkwise.nn.linear import DeviceLike


class SinkToken(nn.Module):
    r"""One learned vector, prepended to a sequence of embeddings: T tokens become T + 1.

    A model that is trained with it concentrates its sinks there, so that a sink cache needs this
    token only (`num_sink_tokens=1`). `without` drops the first position of the output again. The
    vector starts as a draw from $N(0, \mathrm{std}^2)$.

    Reference: Xiao et al., 2023, arXiv 2309.17453, section 3.3.
    """

    def __init__(
        self,
        dim: int,
        std: float = 0.02,
        *,
        device: DeviceLike = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`device` and `dtype` as in torch's modules."""
        super().__init__()
        self.vector = nn.Parameter(torch.randn(dim, device=device, dtype=dtype) * std)

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch longer dim"]:
        """`x` with the sink token before it."""
        return torch.cat([self.vector.to(x.dtype).expand(len(x), 1, -1), x], dim=1)

    @staticmethod
    def without(
        y: Float[Tensor, "batch longer out"],
    ) -> Float[Tensor, "batch token out"]:
        """The output without the sink token's own position."""
        return y[:, 1:]
