"""A mitigated model called by several threads at once gives each its own result."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sinkwise.mitigations.applying import mitigate
from sinkwise.mitigations.gate import Gate
from sinkwise.mitigations.registers import Registers
from sinkwise.mitigations.sink_logits import SinkLogits
from sinkwise.mitigations.targets import attention_layers
from tests.models import build, run, tensors

CASES = [
    ("llama-sdpa", Gate("elementwise", "paper")),
    ("bert-sdpa", Gate("headwise", "paper")),
    ("gpt2-eager", Gate("elementwise", "paper")),
    ("timm-vit-sdpa", Gate("headwise", "paper")),
    ("open_clip", Gate("elementwise", "paper")),
    ("llama-eager", SinkLogits()),
    ("bert-sdpa", SinkLogits()),
    ("vit-sdpa", Registers(3)),
]
THREADS = 3


def moved(inputs, by):
    """Other inputs of the same shape: rolled along the last axis."""
    if isinstance(inputs, dict):
        return {key: moved(value, by) for key, value in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(moved(value, by) for value in inputs)
    return inputs.roll(by, -1) if isinstance(inputs, torch.Tensor) else inputs


@pytest.mark.parametrize(("name", "mitigation"), CASES, ids=str)
def test_threads_do_not_meet(name, mitigation):
    model, inputs = build(name)
    mitigate(model, mitigation)
    given = [moved(inputs, by) for by in range(THREADS)]
    with torch.no_grad():
        wanted = [tensors(run(model, each)) for each in given]
    assert not torch.equal(wanted[0][0], wanted[1][0])
    # Every thread waits in every attention layer until all have entered it.
    barrier = threading.Barrier(THREADS, timeout=20)

    def meet(*_):
        barrier.wait()

    handles = [
        layer.attention.register_forward_pre_hook(meet)
        for layer in attention_layers(model, "none", "cannot test")
    ]

    def work(each):
        with torch.no_grad():
            return tensors(run(model, each))

    with ThreadPoolExecutor(THREADS) as pool:
        for _ in range(3):
            for got, want in zip(pool.map(work, given), wanted, strict=True):
                assert all(map(torch.equal, got, want))
    for handle in handles:
        handle.remove()
