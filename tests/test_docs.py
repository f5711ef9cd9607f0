"""The documentation: it names what exists, all of it, and its charts show their tables."""

import importlib
import importlib.util
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sinkwise
import sinkwise as sw
import sinkwise.nn

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("[A-KM-Z]*.md"), ROOT / "bench" / "README.md"])
"""Every page but LOG.md, which is kept as it was written."""
FIGURES = ["mitigations", "synthetic", "architectures", "streaming", "costs"]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a script of docs/ as it is run there."""
    added: list[str] = []

    def load(path: str) -> Any:
        file = DOCS / path
        monkeypatch.syspath_prepend(str(file.parent))
        before = set(sys.modules)
        spec = importlib.util.spec_from_file_location(f"docs_{file.stem}", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        added.extend(name for name in set(sys.modules) - before if name in _OURS)
        return module

    yield load
    for name in added:
        sys.modules.pop(name, None)


_OURS = {path.stem for path in DOCS.rglob("*.py")}


# Names


def documented() -> set[str]:
    """What the API pages document."""
    pages = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    return set(re.findall(r"^::: (sinkwise[\w.]+)$", pages, flags=re.MULTILINE))


def test_every_public_name_is_on_an_api_page() -> None:
    names = {f"sinkwise.{name}" for name in sinkwise.__all__ if name != "__version__"}
    assert names <= documented(), names - documented()
    modules = {name for name in sinkwise.nn.__all__ if f"sinkwise.{name}" not in names}
    assert {f"sinkwise.nn.{name}" for name in modules} <= documented()
    assert "`sw.__version__`" in (DOCS / "api" / "index.md").read_text()


def test_api_pages_name_nothing_else() -> None:
    for path in documented():
        module, _, name = path.rpartition(".")
        assert name in importlib.import_module(module).__all__, path


def test_directives_find_where_a_name_is_defined(scripts: Any) -> None:
    found = scripts("hooks/api.py").directives("::: sinkwise.Gate\n\n::: sinkwise.nn.rescale\n")
    assert "::: sinkwise.mitigations.gate.Gate\n" in found and 'heading: "sw.Gate"' in found
    assert "::: sinkwise.nn.sink_logit.rescale\n" in found and 'heading: "sw.nn.rescale"' in found


def commands() -> dict[str, dict[str, str]]:
    """Options of every command with their defaults, as the page writes them."""
    from typer.main import get_command

    from sinkwise.cli.app import app

    found = {}
    waiting: list[tuple[str, Any]] = [("sinkwise", get_command(app))]
    for name, command in waiting:  # grows
        children = getattr(command, "commands", {})
        waiting += [(f"{name} {word}", child) for word, child in children.items()]
        if not children:
            options = [one for one in command.params if one.opts[0].startswith("-")]
            found[name] = {option: default(one) for one in options for option in one.opts}
    return found


def default(parameter: Any) -> str:
    """The default of an option in the words of the page."""
    if parameter.required:
        return "required"
    if parameter.default is None:
        return "none"
    return "off" if parameter.default is False else f"`{parameter.default}`"


def test_every_option_of_every_command_is_documented_and_no_other() -> None:
    page = (DOCS / "commands.md").read_text()
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    written = {
        section.partition("\n")[0]: dict(
            re.findall(r"^\| `(--[a-z-]+)` \| ([^|]+?) \|", section, flags=re.MULTILINE)
        )
        for section in sections
    }
    assert written == commands()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_option_that_a_page_names_exists(page: Path) -> None:
    known = {"--help", *(option for options in commands().values() for option in options)}
    text = re.sub(r"\\\n\s*", "", page.read_text())  # a command may continue on the next line
    lines = [line.partition(" #")[0] for line in text.splitlines()]
    called = " ".join(line for line in lines if line.startswith("sinkwise "))
    inline = " ".join(re.findall(r"`((?:sinkwise |--)[^`]+)`", text))
    named = set(re.findall(r"(?<!\S)(--[a-z][a-z-]+)", f"{called} {inline}"))
    others = {"--write", "--rounds", "--model", "--lengths", "--memory", "--case", "--variants",
              "--device", "--hypothesis-profile"}  # fmt: skip
    if "bench/" in text:  # options of the benchmarks
        named -= others
    assert named <= known, named - known


def test_every_column_of_a_scan_is_defined() -> None:
    from sinkwise.synthetic.shipped import load_shipped

    _, _, sample = load_shipped("nop")
    scan = sw.scan(sw.load("demo:nop"), [sample.inputs[:2]])
    page = (DOCS / "concepts.md").read_text()
    for heading in ("events", "heads", "layers"):
        section = page[page.index(f"### {heading.capitalize()}") :].partition("\n### ")[0]
        cells = re.findall(r"^\| (`.+?) \|", section, flags=re.MULTILINE)
        written = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
        columns = set(getattr(scan, heading).columns)
        kinds = {name for name in columns if name.startswith("received_")} - written
        if heading == "layers":
            columns, written = columns - kinds, written - {"received_KIND"}
        assert columns == written, heading


def test_every_kind_of_token_is_named() -> None:
    from sinkwise.core.layout import KINDS

    row = next(line for line in (DOCS / "concepts.md").read_text().splitlines() if "`kind`" in line)
    assert set(KINDS) <= set(re.findall(r"`(\w+)`", row))


# Links and code


def links(page: Path) -> list[str]:
    """Targets of a page's links to files."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return [
        target.partition("#")[0]
        for target in re.findall(r"\]\(([^)\s]+)\)", text)
        if ":" not in target and not target.startswith("#")
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = [target for target in links(page) if not (page.parent / target).exists()]
    assert not broken


def test_contributing_names_files_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = set(re.findall(r"`((?:src|tests|docs|bench|examples)/[\w./]+)`", text))
    assert len(paths) > 10
    assert not [path for path in paths if not (ROOT / path).exists()]


@pytest.mark.weights
@pytest.mark.parametrize("page", sorted((DOCS / "guides").glob("*.md")), ids=lambda page: page.stem)
def test_code_of_the_guides_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(Path(__file__).parent / "texts" / "pride.txt", tmp_path / "book.txt")
    monkeypatch.chdir(tmp_path)
    model = sw.load("pypi:minilm-l6")
    sw.scan(model, sw.text("book.txt", length=64, samples=1)).save("scan")
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, page.name, "exec"), {})


# Charts


@pytest.mark.parametrize("name", FIGURES)
def test_a_chart_shows_its_table(name: str, scripts: Any) -> None:
    script = scripts(f"figures/{name}.py")
    tables = importlib.import_module("page_tables")
    assert tables.stored(script.OUT) == script.rows(), f"run docs/figures/{name}.py again"
    assert script.PAGE.read_text().find(script.OUT.name) > 0
    assert script.figure(script.rows()).to_dict()


def test_charts_leave_no_row_out(scripts: Any) -> None:
    tables = scripts("figures/page_tables.py")

    def column(page: str, heading: str) -> list[str]:
        return [next(iter(row.values())) for row in tables.table(ROOT / page, heading)]

    rows = {name: scripts(f"figures/{name}.py").rows() for name in FIGURES}
    assert [row["mitigation"] for row in rows["mitigations"]] == column(
        "docs/mitigations.md", "| mitigation | NOP task"
    )
    experiments = column("docs/synthetic.md", "| experiment | layer | error | attention, NOP")
    assert len(rows["synthetic"]) == len(experiments) > 20
    assert {row["experiment"].partition(", layer")[0] for row in rows["synthetic"]} == {
        name for name in experiments if name
    }
    assert sum(row["architectures"] for row in rows["architectures"]) == len(
        column("docs/architectures.md", "| name | class |")
    )
    assert [row["cache"] for row in rows["streaming"]] == column(
        "docs/streaming.md", "| cache | perplexity |"
    )
    assert {row["case"] for row in rows["costs"]} == set(
        column("bench/README.md", "| case | plain, ms |")
    )


def test_readme_quotes_the_tables(scripts: Any) -> None:
    readme = (ROOT / "README.md").read_text()
    rows = {name: scripts(f"figures/{name}.py").rows() for name in ("architectures", "costs")}
    count = sum(row["architectures"] for row in rows["architectures"])
    assert f"[{count} architectures]" in readme
    times = [row["time"] for row in rows["costs"] if row["variant"] == "scan"]
    quoted = f"takes {min(times):.2f} to {max(times):.2f} times as long"
    assert quoted in readme and quoted in (ROOT / "bench" / "README.md").read_text()


def test_the_stripes_are_those_of_the_demonstration(scripts: Any) -> None:
    from sinkwise.synthetic.shipped import load_shipped
    from sinkwise.synthetic.signature import signatures

    script = scripts("figures/two_stripes.py")
    stored = importlib.import_module("page_tables").stored(script.OUT)
    assert [row["model"] for row in stored] == ["nop", "broadcast"]
    for row in stored:
        model, task, sample = load_shipped(row["model"])
        one = signatures(model, sample.inputs, task.sink(sample))[0]
        assert row["value_ratio"] == pytest.approx(float(one.value_ratio.mean()), rel=1e-4)
        drawn = script.stripe(row["model"])
        assert float(drawn.value_norms[drawn.sink]) == pytest.approx(row["shown"], rel=1e-3)
        assert float(drawn.attention[:, drawn.sink].mean()) > 0.8


def test_numbers_of_a_cell(scripts: Any) -> None:
    measured = scripts("figures/page_tables.py").measured
    assert measured("0.10 (0.09 to 0.12)") == (0.10, 0.09, 0.12)
    assert measured("1,158.22") == (1158.22,) * 3
    assert measured("1e-04 (9e-05 to 1e-04)") == (1e-4, 9e-5, 1e-4)
    assert measured("1.08 x")[0] == 1.08
    assert measured("-") is None and measured("") is None


# The site


def test_a_script_becomes_a_page(scripts: Any) -> None:
    page = scripts("hooks/literate.py").page(
        '"""A title.\n\nWhat it is.\n"""\n\nimport os\n\n# First *this*,\n# then that.\n\n'
        "for _ in range(2):\n    # an inner comment\n    print(os)\n"
    )
    assert page == (
        "# A title\n\nWhat it is.\n\n```python\nimport os\n```\n\nFirst *this*,\nthen that.\n\n"
        "```python\nfor _ in range(2):\n    # an inner comment\n    print(os)\n```\n"
    )


def test_links_hold_on_the_site(scripts: Any) -> None:
    rewritten = scripts("hooks/links.py").rewritten
    assert rewritten("[a](../bench/README.md#x)", "docs/fix.md") == "[a](costs.md#x)"
    assert rewritten("![a](../docs/costs.png)", "bench/README.md") == "![a](costs.png)"
    example = "../../examples/05_your_own_module.py"
    assert rewritten(f"[a]({example})", "docs/guides/fix.md") == (
        "[a](../examples/05_your_own_module.md)"
    )
    assert rewritten("[log](LOG.md)", "README.md") == "log"
    assert rewritten("[a](no-such-file.md)", "README.md") == "[a](no-such-file.md)"
    assert rewritten("[a](https://arxiv.org)", "README.md") == "[a](https://arxiv.org)"


def test_formulas_become_mathml(scripts: Any) -> None:
    pytest.importorskip("latex2mathml")
    mathml = scripts("hooks/formulas.py").mathml
    inline = mathml(r'<p>a <span class="arithmatex">\(x &lt; 1\)</span></p>')
    assert "<math" in inline and "arithmatex" not in inline and "<mi>x</mi>" in inline
    display = mathml('<div class="arithmatex">\n\\[\\frac{a}{b}\\]\n</div>')
    assert 'display="block"' in display and "<mfrac>" in display
