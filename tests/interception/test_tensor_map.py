"""The weak map: entries belong to one tensor object and disappear with it."""

import gc
from collections.abc import Iterator

import pytest
import torch

from sinkwise.interception.tensor_map import TensorMap


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """Entries must not wait for the garbage collector."""
    gc.disable()
    yield
    gc.enable()


def test_an_entry_disappears_with_its_tensor() -> None:
    known: TensorMap[str] = TensorMap()
    one, other = torch.randn(3), torch.randn(3)
    known[one], known[other] = "one", "other"
    assert (known.get(one), known.get(other)) == ("one", "other")
    assert len(known) == 2 and sorted(known.values()) == ["one", "other"]
    del one
    assert len(known) == 1 and known.values() == ["other"]
    known.clear()
    assert len(known) == 0 and known.get(other) is None


def test_a_tensor_is_not_kept_alive_by_its_value() -> None:
    known: TensorMap[torch.Tensor] = TensorMap()
    base = torch.randn(3)
    known[base[1:]] = base
    assert len(known) == 0
    view = base[1:]
    known[view] = base
    assert known.get(view) is base


def test_identity_decides_not_equality() -> None:
    known: TensorMap[int] = TensorMap()
    tensor = torch.zeros(3)
    known[tensor] = 1
    assert known.get(torch.zeros(3)) is None
    assert known.get(tensor.view(3)) is None
    assert known.get(tensor.add_(1)) == 1


@pytest.mark.parametrize("key", ["x", 3, None, [1], {}], ids=str)
def test_any_object_may_be_looked_up(key: object) -> None:
    known: TensorMap[int] = TensorMap()
    tensor = torch.zeros(3)
    known[tensor] = 1
    assert known.get(key) is None


def test_a_new_value_replaces_the_old_one_and_still_disappears() -> None:
    known: TensorMap[int] = TensorMap()
    tensor = torch.zeros(3)
    known[tensor] = 1
    known[tensor] = 2
    assert known.get(tensor) == 2 and len(known) == 1
    del tensor
    assert len(known) == 0


def test_the_entry_of_a_reused_address_survives_the_old_tensor() -> None:
    """The callback of a dead tensor must not remove what a newer one at its address has."""
    known: TensorMap[int] = TensorMap()
    old, new = torch.zeros(3), torch.zeros(3)
    known[old] = 1
    reference = known._entries[id(old)][0]
    known[new] = 2
    known._remove(id(new), reference)
    assert known.get(new) == 2


def test_an_address_that_belongs_to_another_object_is_not_found() -> None:
    known: TensorMap[int] = TensorMap()
    old, new = torch.zeros(3), torch.zeros(3)
    known[old] = 1
    known._entries[id(new)] = known._entries[id(old)]
    assert known.get(new) is None
