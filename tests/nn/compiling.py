"""Compile the modules as one graph each and compare with eager: run as a program by test_compile.

In a process of its own, because the tests' checks of types cannot be traced.
"""

import sys

import torch
from torch import nn

from sinkwise.nn.attention import GatedAttention
from sinkwise.nn.gate import OutputGate
from sinkwise.nn.global_pathway import GlobalPathway, common_mode_penalty
from sinkwise.nn.registers import RegisterTokens
from sinkwise.nn.sink_logit import SinkLogitAttention
from sinkwise.nn.softmax import SoftmaxOne

torch.manual_seed(0)
X, HEADS, REAL = torch.randn(2, 7, 24), torch.randn(2, 3, 7, 8), torch.rand(2, 7) > 0.3


class Penalty(nn.Module):
    def forward(self, x, real):
        return common_mode_penalty(x, real)


class Whole(nn.Module):
    """A block with everything."""

    def __init__(self):
        super().__init__()
        self.registers = RegisterTokens(3, 24)
        self.attention = GatedAttention(24, 3, softmax="learnable", is_causal=True)
        self.pathway = GlobalPathway(24)

    def forward(self, x):
        x = self.registers(x)
        update = self.attention(x)
        x = x + update + self.pathway(x)
        return self.registers.drop(x), common_mode_penalty(update)


class Broken(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum().item() > 0 else x


CASES = {
    "gate, elementwise": (OutputGate(24, 3), (X, X)),
    "gate, headwise": (OutputGate(24, 3, kind="headwise"), (X, X)),
    "registers": (RegisterTokens(4, 24), (X,)),
    "softmax-one": (SoftmaxOne(), (X,)),
    "sink logit": (SinkLogitAttention(3), (HEADS, HEADS, HEADS)),
    "pathway": (GlobalPathway(24), (X, REAL)),
    "penalty": (Penalty(), (X, REAL)),
} | {
    f"attention, {softmax}, {gate}, {'padded' if real is not None else 'open'}": (
        GatedAttention(24, 3, num_kv_heads=1, gate=gate, softmax=softmax, is_causal=True),
        (X,) if real is None else (X, real),
    )
    for softmax, gate in (("vanilla", "headwise"), ("off-by-one", None), ("learnable", "headwise"))
    for real in (None, REAL)
}


def agree(name, module, inputs, backend):
    """Outputs and gradients of the module compiled as one graph are those of eager."""
    torch._dynamo.reset()
    inputs = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    leaves = [x for x in inputs if x.requires_grad] + list(module.parameters())
    results = []
    for run in (module, torch.compile(module, fullgraph=True, backend=backend)):
        out = run(*inputs)
        total = sum(part.square().sum() for part in (out if isinstance(out, tuple) else (out,)))
        results.append([total, *torch.autograd.grad(total, leaves)])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, atol=1e-5, rtol=1e-5)
    print(name)


def main():
    for name, (module, inputs) in CASES.items():
        agree(name, module, inputs, "aot_eager")
    agree("whole, inductor", Whole(), [X], "inductor")
    try:
        agree("broken", Broken(), [X], "aot_eager")
    except (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError):
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
