"""Random lives of a sink cache against the oracle: `pytest --hypothesis-profile=nightly` for more.

A life: a batch of rows gets chunks with padding anywhere, is reordered, cropped, copied and reset.
Every logit that came out must be the oracle's for that row's own text, and after every step the
buffers hold just the first and the most recent tokens.
"""

import copy
from collections import deque
from functools import cache as remembered
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sinkwise.errors import InputError
from sinkwise.streaming import rotation, rows
from sinkwise.streaming.cache import SinkCache
from tests.oracles.positions import llama_logits

from .families import VOCABULARY, build

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 0.7, torch.float16: 0.08}
LONGEST = 70
"""Tokens of a row: the oracle takes them one by one."""


@remembered
def model(dtype: torch.dtype) -> Any:
    """A small Llama with grouped heads; in float64 its norms are in float64 as well."""
    made = build("llama", dtype)
    if dtype == torch.float64:
        for module in made.modules():
            if type(module).__name__ == "LlamaRMSNorm":
                module.forward = partial(norm, module)
    return made


def norm(module: Any, x: Tensor) -> Tensor:
    """x over its root mean square, without a rounding to float32 on the way."""
    return x / (x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon).sqrt() * module.weight


class Life:
    """A cache, and what each of its rows has been given."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.dtype = draw(st.sampled_from(list(TOLERANCE)))
        self.model = model(self.dtype)
        self.sinks, self.window = draw(st.integers(0, 5)), draw(st.integers(1, 13))
        self.cache = SinkCache(self.model, self.window, self.sinks)
        self.begin()

    def begin(self) -> None:
        """An empty cache with a batch of some size."""
        self.texts: list[list[int]] = [[] for _ in range(self.draw(st.integers(1, 4)))]
        self.logits: list[list[Tensor]] = [[] for _ in self.texts]
        self.columns: list[list[bool]] = [[] for _ in self.texts]
        self.evicted = False

    def steps(self) -> None:
        """Token by token, without padding, as `generate` does."""
        for _ in range(self.draw(st.integers(1, 25))):
            self.feed(1, padded=False)

    def feed(self, length: int | None = None, padded: bool = True) -> None:
        """A chunk, padded anywhere."""
        if length is None:
            length = self.draw(st.integers(1, 20))
        if len(self.columns[0]) + length > LONGEST:
            return
        batch = len(self.texts)
        seed = self.draw(st.integers(0, 2**16))
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(5, VOCABULARY, (batch, length), generator=generator)
        share = self.draw(st.sampled_from([1.0, 1.0, 0.9, 0.5])) if padded else 1.0
        real = torch.rand(batch, length, generator=generator) < share
        if padded and self.draw(st.booleans()):  # padding on the left, as generate has it
            real = real.sort(dim=1, stable=True).values
        given = {} if bool(real.all()) else {"attention_mask": real.long()}
        with torch.no_grad():
            out = self.model(tokens, past_key_values=self.cache, **given).logits
        assert bool(out.isfinite().all())
        for row in range(batch):
            self.texts[row] += tokens[row][real[row]].tolist()
            self.logits[row] += list(out[row][real[row]])
            self.columns[row] += real[row].tolist()
            self.evicted |= len(self.texts[row]) > self.sinks + self.window
        self.invariants()

    def invariants(self) -> None:
        """Counts, and what the buffers hold, by a deque."""
        seen, kept, evicted = self.cache.seen, self.cache.kept, self.cache.evicted
        assert seen.tolist() == [len(text) for text in self.texts]
        assert torch.equal(seen, kept + evicted)
        assert self.cache.get_seq_length() == len(self.columns[0])
        layer = self.cache.layers[0]
        inner = self.model.model
        for row, text in enumerate(self.texts):
            recent = deque(text[self.sinks :], maxlen=self.window)
            held = [*text[: self.sinks], *recent]
            assert int(kept[row]) == len(held)
            if not held:
                continue
            with torch.no_grad():
                embedded = inner.layers[0].input_layernorm(inner.embed_tokens(torch.tensor(held)))
                values = inner.layers[0].self_attn.v_proj(embedded)
            stored = layer.values[row, :, : len(held)].transpose(0, 1).flatten(1)
            for one in values:  # the newest among them
                assert float((stored - one).abs().amax(1).min()) < TOLERANCE[self.dtype]

    def reorder(self) -> None:
        """Rows in a new order, some twice, some not at all."""
        batch = len(self.texts)
        order = self.draw(st.lists(st.integers(0, batch - 1), min_size=batch, max_size=batch))
        self.cache.reorder_cache(torch.tensor(order))
        if self.columns[0]:
            for name in ("texts", "logits", "columns"):
                setattr(self, name, [list(getattr(self, name)[row]) for row in order])

    def crop(self) -> None:
        """Columns removed; refused after an eviction."""
        columns = len(self.columns[0])
        away = self.draw(st.integers(0, columns))
        if self.evicted and away:
            with pytest.raises(InputError, match="evicted"):
                self.cache.crop(-away)
            return
        self.cache.crop(-away)
        for row, real in enumerate(self.columns):
            left = sum(real[: columns - away])
            self.columns[row] = real[: columns - away]
            self.texts[row] = self.texts[row][:left]
            self.logits[row] = self.logits[row][:left]

    def copy(self) -> None:
        """Go on with a copy."""
        other = copy.deepcopy(self.cache)
        self.cache.close()
        self.cache = other

    def reset(self) -> None:
        """All over again."""
        self.compare()
        self.cache.reset()
        self.begin()

    def compare(self) -> None:
        """All logits so far against the oracle."""
        for text, logits in zip(self.texts, self.logits, strict=True):
            if text:
                want = llama_logits(model(torch.float64), text, self.sinks, self.window)
                if self.dtype not in (torch.float32, torch.float64):
                    want = llama_logits(self.model, text, self.sinks, self.window)
                off = (torch.stack(logits).double() - want).abs().max()
                assert float(off) < TOLERANCE[self.dtype]


@given(st.data())
def test_lives_of_a_cache(data: st.DataObject) -> None:
    ahead = data.draw(st.integers(1, 30), label="positions until a re-base")
    shifts = data.draw(st.integers(1, 9), label="shifts that sinks are rotated for at once")
    with (
        mock.patch.object(rows, "REBASE_AFTER", ahead),
        mock.patch.object(rotation, "MOST_SHIFTS", shifts),
    ):
        life = Life(data.draw)
        for _ in range(data.draw(st.integers(1, 10), label="steps")):
            kinds = ["feed"] * 3 + ["steps"] * 3 + ["reorder", "crop", "copy", "reset"]
            getattr(life, data.draw(st.sampled_from(kinds)))()
        life.compare()
        life.cache.close()
