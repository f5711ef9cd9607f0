"""Register tokens: put before a sequence, distinct, trained, and dropped again."""

import pytest
import torch

from sinkwise.errors import InputError
from sinkwise.nn.registers import RegisterTokens


def test_before_the_sequence_and_dropped_again():
    module = RegisterTokens(3, 5, generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, 7, 5)
    longer = module(x)
    assert longer.shape == (2, 10, 5) and module.count == 3
    assert torch.equal(longer[0, :3], module.tokens) and torch.equal(longer[1, :3], module.tokens)
    assert torch.equal(longer[:, 3:], x)
    assert torch.equal(module.drop(longer), x)


def test_distinct_from_the_start():
    module = RegisterTokens(4, 64, generator=torch.Generator().manual_seed(0))
    assert torch.pdist(module.tokens).min() > 0.1
    assert module.tokens.std().item() == pytest.approx(0.02, rel=0.2)


def test_each_gets_a_gradient_of_its_own():
    module = RegisterTokens(3, 5)
    (module(torch.randn(2, 7, 5)) * torch.arange(10.0)[:, None]).sum().backward()
    torch.testing.assert_close(module.tokens.grad, 2 * torch.arange(3.0)[:, None].expand(3, 5))


def test_half_precision_inputs_keep_their_dtype():
    assert RegisterTokens(2, 5)(torch.randn(1, 3, 5).half()).dtype == torch.float16


def test_none_is_refused():
    with pytest.raises(InputError, match="count=0 must be at least 1"):
        RegisterTokens(0, 5)
