"""The verdict on hand-made frames: every figure in its text is one of the frames."""

import re

import polars as pl
import pytest

import sinkwise as sw
from sinkwise.diagnosis.verdict import ADVICE, judge
from sinkwise.measure.frames import EVENT_SCHEMA

NOP, BROADCAST, MIXED, OTHER, NONE = "nop", "broadcast", "mixed", "unclassified", "none"


def heads(layers, kind="patch", **columns):
    """One row per head: `layers` lists the verdicts of each layer's heads, or (verdict, kind)."""
    rows = []
    for layer, verdicts in (
        layers if isinstance(layers, dict) else dict(enumerate(layers))
    ).items():
        for head, entry in enumerate(verdicts):
            verdict, where = entry if isinstance(entry, tuple) else (entry, kind)
            sunk = verdict != NONE
            rows.append(
                {
                    "layer": layer, "name": f"layers.{layer}", "head": head, "samples": 8,
                    "sink_share": 0.75 if sunk else 0.0, "kind": where if sunk else None,
                    "value_ratio": 0.25 if sunk else None, "verdict": verdict, "nonfinite": 0,
                }
            )  # fmt: skip
    schema = {
        "layer": pl.Int32, "name": pl.String, "head": pl.Int32, "samples": pl.Int64,
        "sink_share": pl.Float64, "kind": pl.String, "value_ratio": pl.Float32,
        "verdict": pl.String, "nonfinite": pl.Int64,
    }  # fmt: skip
    frame = pl.DataFrame(rows, schema=schema)
    return frame.with_columns(**{name: pl.Series(values) for name, values in columns.items()})


def events(*groups):
    """(count, token, kind, mechanism) of each group of sinks."""
    rows = [
        {"sample": 0, "layer": 0, "head": 0, "token": token, "kind": kind, "mechanism": mechanism}
        for count, token, kind, mechanism in groups
        for _ in range(count)
    ]
    return pl.DataFrame(rows, schema=pl.Schema(EVENT_SCHEMA))


def layers(*first):
    frame = pl.DataFrame({"layer": range(len(first)), "received_first": list(map(float, first))})
    return frame.cast({"layer": pl.Int32})


def verdict(frame, found=None, first=(0.0,), **rule):
    return judge(frame, events() if found is None else found, layers(*first), sw.ModelRule(**rule))


@pytest.mark.parametrize(
    ("verdicts", "prescription"),
    [
        ([NONE] * 10, "none"),
        ([NOP] * 10, "gate"),
        ([BROADCAST] * 10, "registers"),
        ([NOP] * 5 + [BROADCAST] * 5, "gate+registers"),
        ([MIXED] * 10, "gate+registers"),
        ([OTHER] * 10, "none"),
        # From four fifths on, one mechanism alone is answered, whichever it is.
        ([NOP] * 4 + [BROADCAST], "gate"),
        ([NOP] + [BROADCAST] * 4, "registers"),
        ([NOP] * 7 + [BROADCAST] * 2, "gate+registers"),
        ([NOP] * 2 + [BROADCAST] * 7, "gate+registers"),
        # Heads whose mechanism is not known, or that have no sink, do not weigh.
        ([NOP] + [OTHER] * 9, "gate"),
        ([BROADCAST] + [NONE] * 9, "registers"),
        # Registers that are there already are the answer to what is broadcast from them.
        ([(BROADCAST, "register")] * 10, "none"),
        ([(NOP, "register")] * 10, "gate"),
        ([(MIXED, "register")] * 10, "gate"),
        ([(BROADCAST, "register")] * 9 + [NOP], "gate"),
        ([(BROADCAST, "register")] * 9 + [BROADCAST], "registers"),
        ([(NOP, "register")] * 5 + [BROADCAST] * 5, "gate+registers"),
    ],
)
def test_prescriptions(verdicts, prescription):
    found = verdict(heads([verdicts]))
    assert found.prescription == prescription
    assert found.advice == ADVICE[prescription]


@pytest.mark.parametrize(("sinks", "prescription"), [(0, "none"), (1, "none"), (2, "gate")])
def test_a_model_of_few_sinks_is_left_alone(sinks, prescription):
    """2 of 100 heads are 2 %, one is fewer; in a small model one head counts."""
    found = verdict(heads([[NOP] * sinks + [NONE] * (100 - sinks)]))
    assert found.prescription == prescription
    assert found.evidence[0].startswith(f"{sinks} of 100 heads")
    assert verdict(heads([[NOP] + [NONE] * 9])).prescription == "gate"
    assert verdict(heads([[NOP] + [NONE] * 9]), min_head_share=0.2).prescription == "none"


@pytest.mark.parametrize("dominance", [0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
def test_dominance_is_the_same_from_both_sides(dominance):
    for total in (5, 7, 10, 20):
        for many in range(total // 2 + 1, total + 1):
            few = total - many
            gate = verdict(heads([[NOP] * many + [BROADCAST] * few]), dominance=dominance)
            registers = verdict(heads([[BROADCAST] * many + [NOP] * few]), dominance=dominance)
            alone = many / total >= dominance
            assert gate.prescription == ("gate" if alone else "gate+registers")
            assert registers.prescription == ("registers" if alone else "gate+registers")


def numbers(line):
    return [float(n) for n in re.findall(r"\d+(?:\.\d+)?", line)]


def test_the_summary_counts():
    found = verdict(heads([[NOP] * 3 + [BROADCAST] * 2 + [MIXED, OTHER, OTHER], [NONE] * 8]))
    line = found.evidence[0]
    assert numbers(line) == [8, 16, 50, 3, 2, 1, 2, 75]
    assert "3 NOP, 2 broadcast, 1 mixed, 2 unclassified" in line


@pytest.mark.parametrize(
    ("count", "places"),
    [
        (1, ["early"]),
        (2, ["early", "middle"]),
        (3, ["early", "middle", "deep"]),
        (4, ["early", "early", "middle", "deep"]),
        (7, ["early"] * 3 + ["middle"] * 2 + ["deep"] * 2),
        (12, ["early"] * 4 + ["middle"] * 4 + ["deep"] * 4),
    ],
)
@pytest.mark.parametrize("numbered", [lambda i: i, lambda i: 5 + 3 * i])
def test_thirds_of_the_depth(count, places, numbered):
    """By the order of the layers that attend, whatever their numbers."""
    frame = heads({numbered(i): [NOP] * (i + 1) for i in range(count)})
    table = verdict(frame).by_depth
    wanted = {}
    for i, place in enumerate(places):
        entry = wanted.setdefault(place, [numbered(i), numbered(i), 0])
        entry[1], entry[2] = numbered(i), entry[2] + i + 1
    rows = {row["depth"]: [row["first"], row["last"], row["heads"]] for row in table.to_dicts()}
    assert rows == wanted
    assert table["sinks"].to_list() == table["nop"].to_list() == table["heads"].to_list()


def test_the_depth_lines():
    kinds = ["cls", "cls", "patch", "patch"]
    layout = [
        [(NOP, kind) for kind in kinds[:3]] + [NONE],
        [NONE] * 4,
        [(BROADCAST, "register")] * 2 + [(MIXED, "bos"), (OTHER, "register")],
    ]
    shares = [0.2, 0.4, 0.9, 0.0] + [0.0] * 4 + [1.0, 0.5, 0.7, 0.6]
    ratios = [0.1, 0.2, 0.06, None] + [None] * 4 + [1.0, 0.9, 0.8, None]
    frame = heads(layout, sink_share=shares, value_ratio=ratios)
    early, deep = (line for line in verdict(frame).evidence if "heads have a sink (" in line)
    assert early == (
        "Early (layer 0): 3 of 4 heads have a sink (3 NOP), mostly on the class token, on 40% of "
        "the inputs, median value ratio 0.10."
    )
    assert deep == (
        "Deep (layer 2): 4 of 4 heads have a sink (2 broadcast, 1 mixed, 1 unclassified), mostly "
        "on registers, on 65% of the inputs, median value ratio 0.90."
    )
    wide = heads([[NOP]] * 6)
    lines = [line for line in verdict(wide).evidence if "heads have a sink (" in line]
    assert [line.split(":")[0] for line in lines] == [
        "Early (layers 0-1)", "Middle (layers 2-3)", "Deep (layers 4-5)"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("cls", "the class token"), ("bos", "the first token (BOS)"), ("register", "registers"),
        ("patch", "patches"), ("text", "text tokens"), ("special", "special tokens"),
        ("other", "tokens of unknown kind"), ("first", "the first token"),
    ],
)  # fmt: skip
def test_kinds_in_words(kind, words):
    assert f"mostly on {words}, " in verdict(heads([[NOP]], kind=kind)).evidence[1]


def test_the_token_lines():
    groups = [(6, 0, "bos", NOP), (2, 0, "bos", BROADCAST), (7, 5, "text", BROADCAST)]
    found = verdict(heads([[NOP]]), events(*groups, (5, 7, "text", OTHER)))
    lines = [line for line in found.evidence if line.startswith("Token")]
    assert lines == [
        "Token 0 (bos) is 40% of all sinks: 75% NOP, 25% broadcast.",
        "Token 5 (text) is 35% of all sinks: 0% NOP, 100% broadcast.",
    ]
    tied = [(1, token, kind, NOP) for token, kind in ((9, "text"), (4, "text"), (4, "bos"))]
    for order in (tied, tied[::-1]):
        lines = verdict(heads([[NOP]]), events(*order)).evidence[-2:]
        assert [line.split(" is ")[0] for line in lines] == ["Token 4 (bos)", "Token 4 (text)"]
    spread = [(1, token, "patch", NOP) for token in range(30)]
    found = verdict(heads([[NOP]]), events(*spread))
    assert not [line for line in found.evidence if line.startswith("Token")]


def test_registers_in_words():
    frame = heads([[(BROADCAST, "register")] * 3 + [(NOP, "register")] * 2 + [BROADCAST]])
    text = verdict(frame).evidence
    assert [numbers(line) for line in text if "already" in line] == [[3]]
    assert [numbers(line) for line in text if "bin" in line] == [[2]]


def test_maps_that_are_not_finite_are_reported():
    frame = heads([[NOP, NOP, NONE]], nonfinite=[3, 0, 8])
    line = next(line for line in verdict(frame).evidence if "NaN" in line)
    assert numbers(line) == [11, 24]
    assert not [line for line in verdict(heads([[NOP]])).evidence if "NaN" in line]


def test_a_missing_signature_is_reported():
    assert "neither" not in " ".join(verdict(heads([[NOP, OTHER]])).evidence)
    found = verdict(heads([[OTHER] * 3]))
    assert any("No sink shows the signature" in line for line in found.evidence)


@pytest.mark.parametrize("first", [(0.1, 0.4, 0.2), (float("nan"), 0.4, 0.2)])
def test_a_near_miss_is_reported(first):
    """Much attention to the first token that no rule calls a sink; NaN layers do not hide it."""
    found = verdict(heads([[NONE]] * 3), first=first)
    assert found.prescription == "none"
    line = found.evidence[-1]
    assert "0.40" in line and "layer 1" in line and "rule is less strict" not in line
    stricter = judge(heads([[NONE]] * 3), events(), layers(*first), sw.ModelRule(), "mean")
    assert stricter.evidence[-1].endswith("the event rule (the `mean` rule is less strict).")
    for quiet in ((0.149, 0.0), (float("nan"),)):
        assert len(verdict(heads([[NONE]]), first=quiet).evidence) == 1


def test_a_bin_that_registers_share_is_reported():
    """Four registers with a tenth of the attention each are one sink that no rule sees."""

    def lines(frame, received):
        table = layers(*[0.0] * len(received)).with_columns(
            received_register=pl.Series(received, dtype=pl.Float64)
        )
        found = judge(frame, events(), table, sw.ModelRule())
        return [line for line in found.evidence if "All registers together" in line]

    for frame in (heads([[NONE]] * 3), heads([[NOP] * 3] * 3)):
        (line,) = lines(frame, [0.1, 0.41, float("nan")])
        assert "0.41" in line and "layer 1" in line
        assert not lines(frame, [0.1, 0.29, float("nan")])
    assert not lines(heads([[(NOP, "register")]] * 3), [0.1, 0.41, 0.0]), "said by the sinks"


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ([1.0, 1.0, 0.25], "half of them on every input."),
        ([0.75, 0.75, 1.0], "half of them on at least 75% of the inputs."),
        ([0.999, 0.999, 0.999], "half of them on at least 99% of the inputs."),
    ],
)
def test_how_often_half_of_the_sinks_are_there(shares, words):
    found = verdict(heads([[NOP] * 3], sink_share=shares))
    assert found.evidence[0].endswith(words)


def test_a_single_sample_is_described_without_shares_of_the_inputs():
    """A share of a single input would always be 100%."""
    one = heads([[NOP, NONE], [BROADCAST, OTHER]], kind="first", samples=[1] * 4)
    one = one.with_columns(sink_share=pl.Series([1.0, 0.0, 1.0, 1.0]))
    assert verdict(one).evidence[:3] == (
        "3 of 4 heads (75%) have a sink: 1 NOP, 1 broadcast, 1 unclassified.",
        "Early (layer 0): 1 of 2 heads have a sink (1 NOP), mostly on the first token, median "
        "value ratio 0.25.",
        "Middle (layer 1): 2 of 2 heads have a sink (1 broadcast, 1 unclassified), mostly on the "
        "first token, median value ratio 0.25.",
    )
    two = verdict(one.with_columns(samples=pl.lit(2))).evidence
    assert two[0].endswith("half of them on every input.")
    assert "on 100% of the inputs" in two[1]
