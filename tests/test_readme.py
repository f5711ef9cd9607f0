"""README is short, its code runs, its excerpt is what the command prints, and its names exist."""

import doctest
import importlib
import math
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sinkwise

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_WORDS = 1200
NUMBER = re.compile(r"\d[\d,]*\.?\d*")


def blocks(language: str) -> list[str]:
    """The fenced code blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def alike(wanted: str, printed: str) -> bool:
    """Whether two lines have the same words, and numbers within 5 % or 0.02.

    The number at the start of a table row names its layer and must be equal.
    """
    if NUMBER.sub("#", wanted).split() != NUMBER.sub("#", printed).split():
        return False
    one, other = (
        [float(number.replace(",", "")) for number in NUMBER.findall(line)]
        for line in (wanted, printed)
    )
    row = wanted.startswith(" ") and bool(one)
    return (not row or one[0] == other[0]) and all(
        math.isclose(a, b, rel_tol=0.05, abs_tol=0.02 if a < 2 else 0)
        for a, b in zip(one, other, strict=True)
    )


def missing(excerpt: list[str], printed: list[str]) -> list[str]:
    """Lines of an excerpt that are not printed, in this order; `...` stands for any lines."""
    found, rest = [], iter(printed)
    for line in excerpt:
        if line.strip() != "..." and not any(alike(line, other) for other in rest):
            found.append(line)
            rest = iter(printed)
    return found


@pytest.mark.weights
def test_the_excerpt_is_what_the_command_prints(tmp_path: Path) -> None:
    (command,) = (
        line
        for block in blocks("bash")
        for line in block.splitlines()
        if line.startswith("sinkwise diagnose pypi:")
    )
    excerpt = [line for block in blocks("text") for line in block.splitlines()]
    assert sum("..." not in line for line in excerpt) >= 6
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command), "--out", str(tmp_path / "scan")],
        capture_output=True, text=True, cwd=ROOT, check=True,
    )  # fmt: skip
    assert missing(excerpt, done.stdout.splitlines()) == []


def test_that_comparison_can_fail() -> None:
    printed = ["    4  0 first (60%)  9/9  0.14  878.5", "", "- 216 of 270 heads"]
    assert missing(["    4  0 first (61%)  9/9  0.15  880.0", "..."], printed) == []
    assert missing(["    4  0 first (60%)  9/9  0.17  878.5"], printed)
    assert missing(["    4  0 text (60%)  9/9  0.14  878.5"], printed)
    assert missing(["    5  0 first (60%)  9/9  0.14  878.5"], printed)
    assert missing(["- 216 of 270 heads", printed[0]], printed) == [printed[0]]


def test_a_stranger_has_time_for_it() -> None:
    assert len(README.split()) <= MOST_WORDS


@pytest.mark.weights
def test_python_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(Path(__file__).parent / "texts" / "pride.txt", tmp_path / "book.txt")
    monkeypatch.chdir(tmp_path)
    assert blocks("python")
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), {})
    assert (tmp_path / "scan" / "events.parquet").is_file()


def test_ci_and_readme_agree_on_the_test_command() -> None:
    command = "pytest -n 2"
    assert any(command in block for block in blocks("bash"))
    assert command in (ROOT / ".ci" / "run").read_text()


def test_the_tree_names_every_folder() -> None:
    (tree,) = re.findall(r"```\nsrc/sinkwise/\n(.*?)```", README, flags=re.DOTALL)
    package = ROOT / "src" / "sinkwise"
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    assert set(re.findall(r"(\w+)/", tree)) == folders


def test_docstring_examples() -> None:
    for module in pkgutil.walk_packages(sinkwise.__path__, "sinkwise."):
        if module.name.endswith("__main__"):
            continue
        result = doctest.testmod(importlib.import_module(module.name))
        assert result.failed == 0, module.name
