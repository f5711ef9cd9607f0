"""The experiments by name: which exist, and how they change the task."""

import pytest

from sinkwise.errors import InputError
from sinkwise.synthetic.forms import FORMS, MITIGATIONS, experiment


def names():
    for kind, forms in FORMS.items():
        for form in forms:
            for mitigation in MITIGATIONS:
                yield kind, form, mitigation


def test_each_exists_or_is_refused():
    fitting = 0
    for kind, form, mitigation in names():
        try:
            found = experiment(kind, form, mitigation)
        except InputError as error:
            assert f"mitigation={mitigation!r} does not exist" in str(error)
            continue
        fitting += 1
        task, plain = found.task, experiment(kind, form).task
        assert (task == plain) == (mitigation == "none")
        assert (task.gate is not None) == ("gate" in mitigation or mitigation == "both")
        assert task.pathway == (mitigation == "global-pathway")
        wanted = {"sink-logit": "learnable", "softmax-one": "off-by-one"}.get(mitigation, "vanilla")
        assert task.softmax == wanted
    assert fitting == 10 + 9 + 4 + 4 + 3 * 8 + 3 + 3


def test_defaults():
    assert [experiment(kind).form for kind in FORMS] == ["fast", "deep", "local"]
    assert experiment("nop", mitigation="both").task.num_registers == 1
    assert experiment("nop", mitigation="both").task.null_norm is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nap",), "kind='nap' must be one of nop, broadcast, registers"),
        (
            ("nop", "slow"),
            "form='slow' must be one of fast, no-null, causal, sweep for the kind 'nop'",
        ),
        (("nop", "fast", "gates"), "mitigation='gates' must be one of none, gate"),
    ],
)
def test_unknown_names(arguments, words):
    with pytest.raises(InputError, match=words):
        experiment(*arguments)


def test_expectations_can_fail():
    right = experiment("nop").right
    assert right(["nop"], [1.0]) and not right(["none"], [1.0]) and not right(["broadcast"], [1.0])
    right = experiment("nop", mitigation="gate").right
    assert right(["none"], [1.0]) and not right(["nop"], [1.0])
    for mitigation in ("sink-logit", "softmax-one"):
        right = experiment("nop", "no-null", mitigation).right
        assert right(["none"], [1.0]) and not right(["nop"], [1.0])
        right = experiment("nop", "fast", mitigation).right
        assert right(["nop"], [1.0]) and not right(["none"], [1.0])
        right = experiment("broadcast", "deep", mitigation).right
        assert right(["broadcast", "nop"], [0.99, 0.01]) and not right(["none"] * 2, [0.99, 0.01])
    right = experiment("nop", "no-null", "both").right
    assert right(["nop"], [1.0]) and not right(["none"], [1.0])
    right = experiment("broadcast").right
    assert right(["broadcast", "unclassified"], [0.99, 0.01])
    assert not right(["broadcast", "broadcast"], [0.5, 0.5])
    assert not right(["nop", "broadcast"], [0.99, 0.01])
    right = experiment("broadcast", "plain").right
    assert right(["broadcast", "broadcast"], [0.5, 0.5])
    assert not right(["broadcast", "nop"], [0.5, 0.5])
    right = experiment("registers").right
    assert right(["nop", "broadcast"], [0.01, 0.99])
    assert not right(["broadcast", "broadcast"], [0.01, 0.99])
    right = experiment("registers", mitigation="gate").right
    assert right(["unclassified", "broadcast"], [0.01, 0.99])
    assert not right(["nop", "broadcast"], [0.1, 0.9])
