"""The house: imports go downwards, and the contract that says so can fail."""

import shutil
import subprocess
import sys
from pathlib import Path

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
    file.write_text(file.read_text() + "\nfrom sinkwise import scanning\n")
    done = lint(tmp_path)
    assert done.returncode != 0
    assert "BROKEN" in done.stdout


def test_a_module_without_a_floor_breaks_it(tmp_path: Path) -> None:
    (copy(tmp_path) / "src" / "sinkwise" / "homeless.py").write_text('"""No floor."""\n')
    assert lint(tmp_path).returncode != 0


def test_no_file_is_over_400_lines() -> None:
    for file in [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        assert len(file.read_text().splitlines()) <= 400, file
