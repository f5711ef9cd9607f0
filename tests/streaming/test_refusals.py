"""What a sink cache refuses, and that it says why."""

from typing import Any

import pytest
import torch
import transformers

from sinkwise.errors import InputError
from sinkwise.streaming.cache import SinkCache

from .families import build, fed, texts
from .test_attachment import hooks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

OLD = transformers.__version__.startswith("4.")
SINKS, WINDOW = 3, 8


def test_what_cannot_be_right_is_refused() -> None:
    model, tokens = build("llama"), texts(30)
    cache = SinkCache(model, WINDOW, SINKS)

    def refused(match: str, **given: Any) -> None:
        with torch.no_grad(), pytest.raises(InputError, match=match):
            model(**{"input_ids": tokens, "past_key_values": cache, **given})

    refused("use_cache=True as well", use_cache=False)
    refused("makes its own masks", attention_mask=torch.ones(1, 1, 30, 30))
    refused("makes its own masks", attention_mask=torch.ones(2, 30))
    refused("29 columns; it must have 30", attention_mask=torch.ones(1, 29))
    refused("at most 16 tokens at a time", output_attentions=True)
    fed(model, cache, tokens, [30])
    refused("29 columns; it must have 30 .* or 60", attention_mask=torch.ones(1, 29))
    refused("2 rows and the cache holds 1", input_ids=tokens.repeat(2, 1))
    with torch.enable_grad(), pytest.raises(InputError, match="call model"):
        model.train()(tokens, past_key_values=cache)
    model.eval()
    with pytest.raises(InputError, match="not attached"):
        fed(build("llama"), cache, tokens, [30])
    model.config._attn_implementation = "flash_attention_2"
    refused("takes no mask", attention_mask=torch.ones(1, 30).tril(-1))
    assert hooks(model) == 2 and cache._attachment.call is None


@pytest.mark.parametrize("given", [{"window_length": 0}, {"num_sink_tokens": -1},
    {"num_sink_tokens": True}], ids=str)  # fmt: skip
def test_sizes_that_are_none(given: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(given))):
        SinkCache(build("llama"), **given)
