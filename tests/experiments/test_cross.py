"""The sets of experiments and their expectations."""

from sinkwise.experiments.cross import sweep_experiments


def test_the_sweep():
    found = sweep_experiments()
    assert len(found) == 13 and len({one.mitigation for one in found}) == 13
    by = {one.mitigation: one for one in found}
    assert by["threshold 10, gamma 0"].right(["none"], [1.0])
    assert by["threshold 0, gamma 1"].expected == "no sink"
    assert not by["threshold -1, gamma 0"].right(["nop"], [1.0])
    assert not by["threshold -0.7, gamma 0"].right(["broadcast"], [1.0])
    assert not by["threshold 0, gamma 0"].right(["broadcast"], [1.0])
    assert by["threshold 0, gamma 0"].right(["nop"], [1.0])
    assert not by["threshold 0, gamma 0"].right(["none"], [1.0])
