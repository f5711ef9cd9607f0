"""Each check for traces fails on each kind of trace that a capture could leave."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from sinkwise.capturing.capture import capture
from sinkwise.conformance import CHECKS, ConformanceError, check_model, traces
from tests.models import build


def leave(what: str, model: nn.Module) -> Callable[[], None]:
    """Leave a trace of some kind; returns a function that removes it."""
    linear = next(module for module in model.modules() if isinstance(module, nn.Linear))
    if what == "hook":
        return linear.register_forward_hook(lambda *_: None).remove
    if what == "attribute":
        linear.note = 1
        return lambda: delattr(linear, "note")
    if what == "parameter":
        with torch.no_grad():
            linear.weight.mul_(1.0)
        return lambda: None
    if what == "requires_grad":
        linear.weight.requires_grad_(False)
        return lambda: linear.weight.requires_grad_(True)  # type: ignore[return-value]
    if what == "training":
        linear.train()
        return lambda: linear.eval()  # type: ignore[return-value]
    if what == "fast path":
        torch.backends.mha.set_fastpath_enabled(False)
        return lambda: torch.backends.mha.set_fastpath_enabled(True)
    if what == "grad mode":
        torch.set_grad_enabled(False)
        return lambda: torch.set_grad_enabled(True)  # type: ignore[return-value]
    if what == "stance":
        torch.compiler.set_stance("force_eager")
        return lambda: torch.compiler.set_stance("default")  # type: ignore[return-value]
    if what == "mode":
        mode = torch.overrides.BaseTorchFunctionMode()
        mode.__enter__()
        return lambda: mode.__exit__(None, None, None)
    if what == "patch":
        original = nn.functional.softmax
        nn.functional.softmax = lambda *args, **kwargs: original(*args, **kwargs)
        return lambda: setattr(nn.functional, "softmax", original)
    assert what == "seed"
    torch.rand(1)
    return lambda: None


TRACES = {
    "hook": "hooks of", "attribute": "attributes of", "parameter": "tensor",
    "requires_grad": "tensor", "training": "training mode of", "fast path": "fast path",
    "grad mode": "grad mode", "stance": "stance", "mode": "function modes",
    "patch": "attention functions", "seed": "random state",
}  # fmt: skip


@pytest.mark.parametrize("what", TRACES)
@pytest.mark.parametrize("check", CHECKS[-3:], ids=lambda check: check.__name__[6:])
def test_a_trace_fails(check: Callable, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch._dynamo")  # loaded wherever a model was compiled

    model, inputs = build("timm-vit-sdpa")
    undo: list[Callable[[], None]] = []

    @contextlib.contextmanager
    def leaving(model: nn.Module, on_record: Callable, **options: Any) -> Iterator:
        try:
            with capture(model, on_record, **options) as coverage:
                yield coverage
        finally:
            undo.append(leave(what, model))

    monkeypatch.setattr(traces, "capture", leaving)
    try:
        with pytest.raises(ConformanceError, match=TRACES[what]):
            check_model(model, inputs, checks=(check,))
    finally:
        for step in undo:
            step()


@pytest.mark.parametrize("check", CHECKS[-2:], ids=lambda check: check.__name__[6:])
def test_an_exception_that_is_swallowed_fails(
    check: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = build("timm-vit-sdpa")

    @contextlib.contextmanager
    def swallowing(model: nn.Module, on_record: Callable, **options: Any) -> Iterator:
        with contextlib.suppress(traces._Stop), capture(model, on_record, **options) as coverage:
            yield coverage

    monkeypatch.setattr(traces, "capture", swallowing)
    with pytest.raises(ConformanceError, match="did not reach the caller"):
        check_model(model, inputs, checks=(check,))


def test_changed_output_bits_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("timm-vit-sdpa")
    answers = iter([[torch.zeros(2)], [torch.zeros(2)], [torch.full((2,), 1e-30)]])
    monkeypatch.setattr(traces, "outputs_of", lambda *_: next(answers))
    monkeypatch.setattr(traces, "capture", lambda *_: contextlib.nullcontext())
    with pytest.raises(ConformanceError, match="bits differ"):
        check_model(model, inputs, checks=(traces.check_no_trace,))
