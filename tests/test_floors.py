"""The layout: imports point downwards and never in a circle, and both contracts can fail."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sinkwise

ROOT = Path(__file__).parent.parent


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the package in `folder`."""
    return subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"],
        capture_output=True,
        text=True,
        cwd=folder,
        env={"PYTHONPATH": str(folder / "src"), "PATH": "/usr/bin:/bin"},
    )


def copy(target: Path) -> Path:
    """A copy of the sources that may be broken."""
    shutil.copytree(ROOT / "src", target / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", target)
    return target


def test_the_contract_is_kept(tmp_path: Path) -> None:
    done = lint(copy(tmp_path))
    assert done.returncode == 0, done.stdout


def test_an_upward_import_breaks_it(tmp_path: Path) -> None:
    file = copy(tmp_path) / "src" / "sinkwise" / "attention" / "rank.py"
    file.write_text(file.read_text() + "\nfrom sinkwise.scanning import scan\n")
    done = lint(tmp_path)
    assert done.returncode != 0
    assert "its own BROKEN" in done.stdout


def test_a_circle_breaks_it(tmp_path: Path) -> None:
    folder = copy(tmp_path) / "src" / "sinkwise" / "attention"
    lower = folder / "mask.py"
    lower.write_text(lower.read_text() + "\nimport sinkwise.attention.tiles\n")
    done = lint(tmp_path)
    assert done.returncode != 0
    assert "its own KEPT" in done.stdout
    assert "in a circle BROKEN" in done.stdout


def test_a_module_without_a_floor_breaks_it(tmp_path: Path) -> None:
    (copy(tmp_path) / "src" / "sinkwise" / "homeless.py").write_text('"""No floor."""\n')
    assert lint(tmp_path).returncode != 0


def test_the_top_level_has_few_modules_beside_its_folders() -> None:
    modules = [file.stem for file in (ROOT / "src" / "sinkwise").glob("*.py")]
    assert sorted(modules) == ["__init__", "__main__", "errors"]


def test_no_folder_has_the_name_of_a_public_function() -> None:
    folders = {folder.name for folder in (ROOT / "src" / "sinkwise").iterdir() if folder.is_dir()}
    assert "scanning" in folders
    assert not folders & set(sinkwise.__all__)


@pytest.mark.parametrize(("folder", "limit"), [("src", 300), ("tests", 400), ("bench", 400)])
def test_no_file_is_too_long(folder: str, limit: int) -> None:
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    assert {
        str(file): length
        for file in files
        if (length := len(file.read_text().splitlines())) > limit
    } == {}
