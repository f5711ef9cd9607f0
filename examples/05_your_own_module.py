"""Scan a module of your own.

sinkwise needs no adapter for a model that it has never seen. It intercepts attention where torch
computes it: `scaled_dot_product_attention`, `nn.MultiheadAttention`, FlexAttention, or a product, a
softmax and a product. Here is a small encoder with a head layout of its own, the check that what is
captured is right, and a scan that finds a sink which we plant.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sinkwise as sw

torch.manual_seed(0)

# The module under test: one attention layer whose projections share one matrix, in an order that no
# known library uses.


class Mixer(nn.Module):
    """Pre-norm attention with a residual connection."""

    def __init__(self, dim: int = 32, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(dim)
        self.everything = nn.Linear(dim, 3 * dim, bias=False)
        self.out_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.everything(self.norm(x)).unflatten(-1, (self.num_heads, -1, 3))
        q, k, v = (parts[..., i].transpose(1, 2) for i in range(3))
        heads = F.scaled_dot_product_attention(q, k, v)
        return x + self.out_proj(heads.transpose(1, 2).flatten(2))


class Encoder(nn.Module):
    """A stack of mixers."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixer() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


model = Encoder().eval()
x = torch.randn(6, 40, 32)

# `check_model` runs the checks behind the table of architectures on your model: does every captured
# call reproduce the model's own output, are the heads' weights found, is the model left as it was?

print("What check_model says:")
for result in sw.check_model(model, x):
    print(f"  {result.check:34} {result.status:8} {result.message}")

# A scan takes an iterable of batches. This model is untrained and has no sinks, so we plant one. In
# layer 0 all queries of head 0 become large along one channel, token 0 alone has a key along it,
# and the values ignore what marks token 0.

with torch.no_grad():
    weight = model.layers[0].everything.weight.unflatten(0, (4, 8, 3))
    weight[0, :, :2] = 0
    weight[0, 0, 0, 1] = 6.0  # queries of head 0 read channel 1 of the normed input,
    weight[0, 0, 1, 0] = 6.0  # keys read channel 0,
    weight[0, :, 2, 0] = 0  # values ignore channel 0
x[..., 1] = 6.0  # every token is large in channel 1,
x[:, 0] = 0.0
x[:, 0, 0] = 30.0  # and token 0 in channel 0 alone

# Which output weights belong to which head is not known here, so the value ratio is the raw one:
# norms of the values before the output projection instead of after it.

scan = sw.scan(model, [x[:3], x[3:]])
print("\nWhat the scan says:")
for row in scan.heads.iter_rows(named=True):
    if row["verdict"] != "none":
        print(
            f"  {row['name']}, head {row['head']}: token {row['token']} receives "
            f"{row['received']:.2f}, raw value ratio {row['value_ratio_raw']:.2f}: {row['verdict']}"
        )
print(f"  prescription: {scan.verdict().prescription}")
