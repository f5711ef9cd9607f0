"""Kinds of tokens: the first real token of causal attention is named where nothing better is."""

import pytest
import torch

from sinkwise.core.layout import KINDS, TokenLayout, code, name_first


def codes(*rows):
    return torch.tensor([[code(kind) for kind in row.split()] for row in rows])


def words(found):
    return [" ".join(KINDS[i] for i in row) for row in found.tolist()]


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ("text text special text", "first text special text"),
        ("special text text text", "first text text text"),
        ("other other other other", "first other other other"),
        ("pad pad text text", "pad pad first text"),
        ("text text pad pad", "first text pad pad"),
        ("pad text pad text", "pad first pad text"),
        # Kinds that say more stay, and no later token becomes the first.
        ("bos text text text", "bos text text text"),
        ("pad bos text text", "pad bos text text"),
        ("register text text text", "register text text text"),
        ("cls patch patch patch", "cls patch patch patch"),
        ("patch patch patch patch", "patch patch patch patch"),
        ("pad pad pad pad", "pad pad pad pad"),
    ],
)
def test_the_first_real_token_is_named(row, named):
    given = codes(row, "text text text text")
    assert words(name_first(given)) == [named, "first text text text"]
    assert words(given)[0] == row, "the layout itself is left alone"


def test_padding_is_not_real():
    layout = TokenLayout(codes("pad first text pad"))
    assert layout.real.tolist() == [[False, True, True, False]]
    assert layout.kind(0, 1) == "first"
