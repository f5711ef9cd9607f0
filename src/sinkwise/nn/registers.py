"""Register tokens: learned tokens before the sequence, independent of the input."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sinkwise.errors import InputError
from sinkwise.nn.linear import DeviceLike


class RegisterTokens(nn.Module):
    r"""`count` learned tokens of width `dim`, prepended to a sequence and dropped at its end.

    They start as distinct draws from $N(0, \mathrm{std}^2)$: equal registers would stay equal. What
    a model broadcasts, or discards, can go through them instead of through a content token.

    Raises InputError for a count below 1.

    Reference: Darcet et al., 2024, arXiv 2309.16588.
    """

    def __init__(
        self,
        count: int,
        dim: int,
        *,
        std: float = 0.02,
        generator: torch.Generator | None = None,
        device: DeviceLike = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`device` and `dtype` as in torch's modules; `generator` must be on that device."""
        super().__init__()
        if count < 1:
            raise InputError(f"count={count} must be at least 1")
        self.tokens = nn.Parameter(torch.empty(count, dim, device=device, dtype=dtype))
        nn.init.normal_(self.tokens, std=std, generator=generator)

    @property
    def count(self) -> int:
        """The number of registers."""
        return self.tokens.shape[0]

    def forward(self, x: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch longer dim"]:
        """`x` with the registers before it."""
        return torch.cat([self.tokens.to(x.dtype).expand(len(x), -1, -1), x], dim=1)

    def drop(self, x: Float[Tensor, "batch longer dim"]) -> Float[Tensor, "batch token dim"]:
        """`x` without its registers."""
        return x[:, self.count :]
