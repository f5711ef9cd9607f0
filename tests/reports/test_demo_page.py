"""The demonstration's page: its numbers are those measured, its thresholds those of the rules."""

import pytest
import torch

import sinkwise.reports.demo_page as demo_page
from sinkwise.diagnosis.rules import MechanismRule, RelaxedRule, Rules
from sinkwise.experiments.demonstration import MAIN_LAYER, run_demo
from sinkwise.reports.synthetic_table import format_number
from sinkwise.synthetic.shipped import TASKS, load_shipped
from tests.reports.test_page import check
from tests.synthetic import signature


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return {result.name: result for result in run_demo(tmp_path_factory.mktemp("demo"))}


def cells(page, heading):
    """The tables' rows below a heading, by their first cell."""
    section = next(section for section in page.sections if section.heading.startswith(heading))
    return {row[0]: row[1:] for row in section.table[1:]}


def test_numbers(results):
    page = demo_page.demo_page(results)
    check(page.html())
    rows = cells(page, "Two remedies")
    assert set(results) == set(TASKS) and len(rows) == 6
    for name, words in demo_page.MODELS.items():
        model, task, batch = load_shipped(name)
        states = [model.start(batch.inputs), *model.states(batch.inputs)]
        layer = MAIN_LAYER[name]
        attention = model.layers[layer].attention
        mean, ratio = rows[words][:2]
        if name != "broadcast-register":  # the plain form knows no mask
            plain = signature(attention, states[layer].detach(), task.sink(batch))
            assert ratio == format_number(float(plain.ratio.mean()))
            assert mean == f"{float(plain.attention.mean(1).amax(1).mean()):.0%}"
    errors = cells(page, "The proof")
    assert list(errors) == ["A: NOP", "B: broadcast"]
    zeroed, ordinary = (float(x) for x in errors["A: NOP"][1:])
    assert zeroed < 0.05 and ordinary > 1
    assert all(float(x) > 0.9 for x in errors["B: broadcast"][1:])


def test_maps_are_those_of_the_main_layer(results):
    for name, layer in MAIN_LAYER.items():
        model, _, batch = load_shipped(name)
        states = [model.start(batch.inputs), *model.states(batch.inputs)]
        update = (states[layer + 1] - states[layer]).detach().double()
        torch.testing.assert_close(results[name].signature.update, update, atol=1e-4, rtol=1e-4)


def test_thresholds_are_those_of_the_rules(results, monkeypatch):
    html = demo_page.demo_page(results).html()
    rule, usual = MechanismRule(), RelaxedRule()
    for words in (
        f"At {rule.nop_ratio:g} or less the sink is a NOP",
        f"at {rule.broadcast_ratio:g} or more it can be a broadcast",
        f"stable rank of at most {rule.broadcast_rank:g}",
        f"at least {usual.share:.0%} of the queries give it {usual.attention:g} or more",
    ):
        assert words in html
    other = MechanismRule(nop_ratio=0.11, broadcast_ratio=0.61, broadcast_rank=1.7)
    monkeypatch.setattr(demo_page, "RULES", Rules(mechanism=other))
    monkeypatch.setattr(demo_page, "RULE", RelaxedRule(share=0.7, attention=0.43))
    html = demo_page.demo_page(results).html()
    for words in ("At 0.11 or less", "at 0.61 or more", "at most 1.7", "70% of the", "it 0.43 or"):
        assert words in html
