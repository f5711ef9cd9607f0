"""The facade: what it exports, and that importing it costs nothing."""

import subprocess
import sys

import pytest

import sinkwise

HEAVY = ("torch", "transformers", "timm", "polars", "numpy", "rich", "typer", "altair")


def imported_by(code: str) -> set[str]:
    """The heavy packages that a fresh interpreter has loaded after running `code`."""
    script = f"import sys\n{code}\nprint(*[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_import_loads_no_heavy_package() -> None:
    assert imported_by("import sinkwise") == set()


def test_that_test_can_fail() -> None:
    assert "numpy" in imported_by("import sinkwise, numpy")


def test_every_exported_name_is_there_and_keeps_its_meaning() -> None:
    import sinkwise.capturing.capture
    import sinkwise.scanning.scan

    for name in sinkwise.__all__:
        assert getattr(sinkwise, name) is not None
    assert callable(sinkwise.scan)
    assert callable(sinkwise.capture)
    assert set(sinkwise.__all__) <= set(dir(sinkwise))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = sinkwise.nothing
