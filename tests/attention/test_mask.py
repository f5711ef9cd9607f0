"""Which keys of a tile need a bias: all that the full bias changes, and none before."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from sinkwise.attention.mask import bias_tile, biased_keys
from sinkwise.core.records import AttentionMask


@given(st.data())
def test_before_the_biased_keys_the_bias_is_zero(data):
    keys, queries = data.draw(st.integers(1, 13)), data.draw(st.integers(1, 11))
    kind = data.draw(st.sampled_from(["open", "causal", "window", "allowed", "additive"]))
    offset = data.draw(st.integers(0, 5))
    more = {}
    if kind == "window":
        more["window"] = data.draw(st.integers(1, 5))
    if kind == "allowed":
        more["allowed"] = torch.ones(1, 1, 1, keys, dtype=torch.bool)
        more["allowed"][..., 0] = False
    if kind == "additive":
        more["additive"] = torch.arange(float(keys)).reshape(1, 1, 1, keys) + 1
    causal = kind in ("causal", "window") or (kind != "open" and data.draw(st.booleans()))
    mask = AttentionMask(causal=causal, offset=offset, **more)
    first = data.draw(st.integers(0, queries - 1))
    rows = range(first, data.draw(st.integers(first + 1, queries)))
    start = data.draw(st.integers(0, keys - 1))
    cols = range(start, data.draw(st.integers(start + 1, keys)))
    some = biased_keys(mask, rows, cols)
    assert some.stop == cols.stop and cols.start <= some.start <= cols.stop
    whole = bias_tile(mask, rows, cols, torch.float64, torch.device("cpu"))
    if whole is None:
        return
    whole = whole.expand(1, 1, len(rows), len(cols))
    before = some.start - cols.start
    assert (whole[..., :before] == 0).all()
    if some:
        part = bias_tile(mask, rows, some, torch.float64, torch.device("cpu"))
        assert part is not None
        assert torch.equal(part.expand(1, 1, len(rows), len(some)), whole[..., before:])
    if kind == "causal" and some:
        assert (whole[..., before] == -torch.inf).any(), "no key is biased in vain"
