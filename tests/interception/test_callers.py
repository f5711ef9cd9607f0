"""The callers of a kernel: the model's frames, innermost first, none of sinkwise's own."""

from collections.abc import Callable
from types import FrameType

import pytest

from sinkwise.interception.callers import callers


def passing(module: str) -> Callable[[Callable], list[FrameType]]:
    """A function of `module` that calls what it is given."""
    scope: dict = {"__name__": module}
    exec("def call(function):\n    return function()", scope)
    return scope["call"]


@pytest.mark.parametrize("module", ["sinkwise.capturing.mode", "sinkwise.mitigations.gate",
                                    "sinkwise.interception.sdpa"])  # fmt: skip
def test_sinkwise_s_own_frames_are_skipped(module: str) -> None:
    frames = passing(module)(lambda: list(callers()))
    names = [frame.f_code.co_name for frame in frames]
    assert names[:2] == ["<lambda>", "test_sinkwise_s_own_frames_are_skipped"]


@pytest.mark.parametrize("module", ["sinkwise.nn.attention", "sinkwise.synthetic.model",
                                    "transformers.models.x", "sinkwise_extra"])  # fmt: skip
def test_frames_of_models_are_given(module: str) -> None:
    frames = passing(module)(lambda: list(callers()))
    assert [frame.f_code.co_name for frame in frames[:2]] == ["<lambda>", "call"]


def test_a_frame_without_a_module_name_is_given() -> None:
    scope: dict = {"callers": callers, "__name__": None}
    exec("def nameless():\n    return list(callers())", scope)
    del scope["__name__"]
    assert scope["nameless"]()[0].f_code.co_name == "nameless"
