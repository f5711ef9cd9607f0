"""A sink cache under torch.compile and FlexAttention: the same logits, or a refusal."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from sinkwise.errors import InputError
from sinkwise.streaming.cache import SinkCache
from sinkwise.streaming.positions.decoder import decoder_of

from .families import build, texts

pytestmark = pytest.mark.filterwarnings("ignore")

LENGTH = 40


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No compiled code of another test."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@torch.no_grad()
def fed(model: nn.Module, run: nn.Module, cuts: list[int], mask: Tensor | None = None) -> Tensor:
    """Logits of two rows, fed up to each cut in turn."""
    tokens = torch.stack([texts(LENGTH)[0], texts(LENGTH)[0].flip(0)])
    name, out = decoder_of(model).cache_argument, []
    with SinkCache(model, 12, 3) as cache:
        for start, stop in zip([0, *cuts[:-1]], cuts, strict=True):
            given = {} if mask is None else {"attention_mask": mask[:, :stop]}
            out.append(run(tokens[:, start:stop], **{name: cache}, **given).logits)
    return torch.cat(out, dim=1)


@pytest.mark.parametrize("padded", [False, True])
def test_compiled(padded: bool) -> None:
    model, cuts = build("llama"), [8, 9, 25, 26, 27, 40]
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, :5] = 0
    compiled = torch.compile(model, backend="eager")
    want = fed(model, model, cuts, mask if padded else None)
    got = fed(model, compiled, cuts, mask if padded else None)
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], rtol=0, atol=1e-6)


def test_flex_attention_takes_a_prompt_and_steps_and_refuses_what_needs_a_mask() -> None:
    model = build("llama")
    want = fed(model, model, [8, *range(9, LENGTH + 1)])
    model.set_attn_implementation("flex_attention")
    got = fed(model, model, [8, *range(9, LENGTH + 1)])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    with pytest.raises(InputError, match="'flex_attention' takes no mask"):
        fed(model, model, [8, 30])
