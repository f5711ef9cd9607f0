"""README's code runs, its table is what the command prints, and docstrings' examples are true."""

import doctest
import importlib
import pkgutil
import re
import shutil
from pathlib import Path

import pytest

import sinkwise

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The fenced code blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


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


def test_every_option_in_the_readme_exists() -> None:
    from typer.main import get_command

    from sinkwise.cli.app import app

    commands = list(get_command(app).commands.values())  # type: ignore[attr-defined]
    for command in commands:  # grows
        commands += getattr(command, "commands", {}).values()
    known = {option for one in commands for parameter in one.params for option in parameter.opts}
    named = set(re.findall(r"`(--[a-z-]+)", README))
    assert named
    assert named <= known, named - known


def test_docstring_examples() -> None:
    for module in pkgutil.walk_packages(sinkwise.__path__, "sinkwise."):
        if module.name.endswith("__main__"):
            continue
        result = doctest.testmod(importlib.import_module(module.name))
        assert result.failed == 0, module.name
