"""Slots, visibility and cache positions against a list and a deque."""

from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sinkwise.core.retention import Retention
from sinkwise.errors import InputError


@given(st.integers(0, 6), st.integers(1, 9), st.lists(st.integers(0, 60), min_size=1, max_size=5))
def test_slots_are_those_of_a_list_and_a_deque(sinks: int, window: int, seen: list[int]) -> None:
    policy = Retention(sinks, window)
    held = policy.held(torch.tensor(seen))
    for row, count in enumerate(seen):
        first, recent = list(range(min(sinks, count))), deque(range(sinks, count), maxlen=window)
        assert sorted(slot for slot in held[row].tolist() if slot >= 0) == [*first, *recent]
        for slot, token in enumerate(held[row].tolist()):
            assert token == -1 or int(policy.slot(torch.tensor(token))) == slot
        assert int(policy.kept(torch.tensor([count]))) == len(first) + len(recent)
        if count:
            newest = torch.tensor(count - 1)
            order = [*first, *recent]
            found = policy.position(newest, torch.tensor(order)).tolist()
            assert found == list(range(len(order)))
            visible = policy.visible(newest, torch.arange(count)).nonzero()[:, 0].tolist()
            assert visible == order


def test_a_size_that_is_no_integer() -> None:
    sizes = object.__new__(Retention)  # past the type checker of the tests
    object.__setattr__(sizes, "num_sink_tokens", 4)
    object.__setattr__(sizes, "window_length", 8.0)
    with pytest.raises(InputError, match=r"window_length=8\.0"):
        sizes.__post_init__()
