"""Names of the methods, and the sizes that they refuse."""

import pytest

from sinkwise.errors import InputError
from sinkwise.streaming.comparison.methods import Method, check_length, methods


def test_names() -> None:
    names = [one.name for one in methods(9, [0, 2])]
    assert names == ["dense", "0 + 9", "recompute", "2 + 7"]
    assert methods(5, [0, 2, 1], 11)[-1] == Method("sinks", 5, 2, 11)
    assert methods(5, [2], 11)[-1].name == "2 + 3, restarted"


@pytest.mark.parametrize("wrong", [-1, 9])
def test_sinks_that_leave_no_window(wrong: int) -> None:
    with pytest.raises(InputError, match=f"num_sink_tokens={wrong} must be from 0 to 8"):
        methods(9, [wrong])


def test_restarts_without_a_token_to_score_or_without_sinks() -> None:
    with pytest.raises(InputError, match=r"restart_every=10 must be 0 .* or more than 10"):
        methods(5, [2], 10)
    with pytest.raises(InputError, match=r"restart_every=11 must be 0 .* no number of sinks"):
        methods(5, [0], 11)


def test_texts_that_are_too_short() -> None:
    check_length(26, Method("window", 9))
    with pytest.raises(InputError, match="has 25 tokens; it must have more than 25"):
        check_length(25, Method("window", 9))
    check_length(34, Method("sinks", 5, 2, 17))
    with pytest.raises(InputError, match="restart_every=17 must be less than 17"):
        check_length(33, Method("sinks", 5, 2, 17))
