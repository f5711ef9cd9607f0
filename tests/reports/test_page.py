"""Pages are well-formed, escape their text and load nothing from outside."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

import sinkwise.reports.cross_page as cross_page_module
from sinkwise.diagnosis.rules import MeanRule, MechanismRule, Rules
from sinkwise.experiments.experiment_run import run_experiment
from sinkwise.reports.bar_figure import bar_figure
from sinkwise.reports.charts import png, svg
from sinkwise.reports.cross_page import cross_charts, cross_page
from sinkwise.reports.line_figure import line_figure
from sinkwise.reports.logit_figure import logit_curve, logit_figure
from sinkwise.reports.map_figure import map_figure
from sinkwise.reports.page import Figure, Page, Section
from sinkwise.reports.synthetic_page import synthetic_charts, synthetic_page
from sinkwise.reports.synthetic_table import (
    HEADINGS,
    format_number,
    markdown,
    mean_and_range,
    summary_rows,
)
from sinkwise.synthetic.forms import FORMS, experiment

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Balanced(HTMLParser):
    """Fails on tags that are not closed in order."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def check(html):
    parser = Balanced()
    parser.feed(html)
    assert parser.open == []
    assert "<script" not in html
    outside = re.findall(r"(?:src|href)=\"(?!#)[^\"]*\"", html)
    assert outside == []


@pytest.fixture(scope="module")
def groups():
    chosen = [experiment("nop"), experiment("broadcast"), experiment("registers")]
    return [
        [run_experiment(replace(one, task=replace(one.task, steps=15)), seed) for seed in range(2)]
        for one in chosen
    ]


def test_text_is_escaped_and_figures_are_inside(tmp_path):
    chart = line_figure({"a & b": [(0, 1), (1, 2)]}, title="<b>", x="x", y="y")
    section = Section(
        heading="1 < 2", paragraphs=["<script>"], figures=[Figure(chart, "a & b")],
        table=[("n", "<i>"), ("1", "2")], code="a && b",
    )  # fmt: skip
    page = Page(title="<title>", lead=["&"], sections=[section], footer="end")
    html = page.html()
    check(html)
    assert html.count("<svg") == 1 and "&lt;script&gt;" in html and "a &amp;&amp; b" in html
    page.write(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == html


def test_pages_of_experiments(groups):
    for runs in groups:
        html = synthetic_page(runs, synthetic_charts(runs)).html()
        check(html)
        assert runs[0].experiment.expected in html
        assert runs[0].experiment.task.summary in html
        layers = len(runs[0].rows)
        assert html.count("<svg") == 1 + 3 * layers
    html = cross_page(groups, cross_charts(groups)).html()
    check(html)
    assert html.count("<svg") == 6


@pytest.mark.parametrize("kind", FORMS)
def test_every_task_has_a_summary_for_its_page(kind):
    for task in FORMS[kind].values():
        assert task.summary.endswith(".") and not set("$`\\") & set(task.summary)


def lines(chart):
    """The named vertical lines of a bar chart."""
    rules = [layer for layer in chart.to_dict()["layer"] if layer["mark"]["type"] == "rule"]
    values = [layer["data"]["values"][0] for layer in rules]
    return {value["word"]: value["value"] for value in values}


def test_charts_show_the_thresholds_of_the_rules(groups, monkeypatch):
    charts = cross_charts(groups)
    assert lines(charts["nop-largest"]) == {"event rule": MeanRule().threshold}
    rule = MechanismRule()
    usual = {"NOP": rule.nop_ratio, "broadcast": rule.broadcast_ratio}
    names = ("nop-ratio", "broadcast-ratio", "registers-ratio")
    assert [lines(charts[name]) for name in names] == [usual] * 3
    other = Rules(
        bidirectional=MeanRule(threshold=0.37),
        mechanism=MechanismRule(nop_ratio=0.11, broadcast_ratio=0.61),
    )
    monkeypatch.setattr(cross_page_module, "event_rules", lambda task: other)
    charts = cross_charts(groups)
    assert lines(charts["nop-largest"]) == {"event rule": 0.37}
    assert lines(charts["nop-ratio"]) == {"NOP": 0.11, "broadcast": 0.61}


def test_table_rows(groups):
    rows = summary_rows(groups[1])
    assert len(rows) == 2 and {len(row) for row in rows} == {len(HEADINGS)}
    assert rows[0][0] == "broadcast, deep, none" and rows[1][0] == ""
    lines = markdown([HEADINGS, *rows]).splitlines()
    assert len(lines) == 4 and lines[1] == "|" + "---|" * len(HEADINGS)
    assert all(line.count("|") == len(HEADINGS) + 1 for line in lines)


def test_numbers_with_few_digits():
    nan = float("nan")
    assert [format_number(x) for x in (0.0, 0.12345, 43.48, 0.00002)] == [
        "0.000",
        "0.123",
        "43.5",
        "2e-05",
    ]
    assert mean_and_range([nan, nan]) == "-" and mean_and_range([0.5, nan]) == "0.500"
    assert (
        mean_and_range([0.1, 0.3]) == "0.200 (0.100 to 0.300)"
        and mean_and_range([1.0, 1.0]) == "1.000"
    )


def test_figures_hold_their_numbers(groups):
    attention = groups[0][0].after[0].attention[0]
    rows = map_figure(attention, "t").to_dict()["data"]["values"]
    assert len(rows) == attention.numel()
    for row in rows[::7]:
        assert row["attention"] == pytest.approx(
            attention[row["query"], row["key"]].item(), abs=1e-4
        )
    bars = bar_figure({"a": 0.5, "b": 2.0}, title="t", x="x", thresholds={"rule": 0.3}).to_dict()
    assert [row["value"] for row in bars["layer"][0]["data"]["values"]] == [0.5, 2.0]
    assert bars["layer"][2]["data"]["values"][0]["value"] == 0.3
    spec = line_figure({"a": [(0, 1.0), (1, 0.0)]}, title="t", x="x", y="y", log=True).to_dict()
    assert len(spec["data"]["values"]) == 1, "a logarithmic axis holds no zero"


def test_the_sink_logits_curve_falls():
    norms = [point.output_norm for point in logit_curve(range(-4, 9))]
    assert norms == sorted(norms, reverse=True) and norms[0] > 0.8 > 0.01 > norms[-1]
    chart = logit_figure()
    assert png(chart)[:8] == b"\x89PNG\r\n\x1a\n" and svg(chart).startswith("<svg")
