"""What each layer of a decoder keeps."""

import pytest

from sinkwise.streaming.cache import SinkCache

from ..families import build

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def test_layers_that_slide_say_so() -> None:
    assert SinkCache(build("gemma-3"), 8, 3).layer_kinds == ["sliding window", "sinks + window"]
    assert SinkCache(build("mistral"), 8, 3).layer_kinds == ["sliding window"] * 2
    assert SinkCache(build("mistral-long"), 8, 3).layer_kinds == ["sinks + window"] * 2
    assert "sliding, Retention(num_sink_tokens=0, window_length=5)" in repr(
        SinkCache(build("mistral"), 8, 3).layers[0]
    )
