"""`sinkwise.nn` exports what its modules define in public, and the facade what README names."""

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sinkwise
import sinkwise.nn
from sinkwise.nn import __all__ as exported

ROOT = Path(__file__).parents[2]

INTERNAL = {
    "linear",  # how modules draw their weights
    "check_real",  # a shared check
    "column", "refusal", "RescaledAttention",  # the two forms of sink_attention
    "softmax",  # the eager reference of sink_attention
}  # fmt: skip
"""Public in their module, but only for sinkwise itself."""


def defined() -> dict[str, object]:
    """Classes and functions that modules of `sinkwise.nn` define without an underscore."""
    found: dict[str, object] = {}
    for info in pkgutil.iter_modules(sinkwise.nn.__path__):
        module = importlib.import_module(f"sinkwise.nn.{info.name}")
        for name, value in vars(module).items():
            own = getattr(value, "__module__", None) == module.__name__
            if own and not name.startswith("_") and (inspect.isclass(value) or callable(value)):
                found[name] = value
    return found


def test_every_public_name_is_exported() -> None:
    assert set(defined()) - INTERNAL == set(exported)


def test_the_internal_names_exist_and_are_not_exported() -> None:
    assert set(defined()) >= INTERNAL
    assert not INTERNAL & set(exported)


@pytest.mark.parametrize("name", exported)
def test_exports_are_the_definitions_and_documented(name: str) -> None:
    value = getattr(sinkwise.nn, name)
    assert value is defined()[name]
    assert len(inspect.getdoc(value) or "") > 40


def test_the_facade_has_the_same_objects() -> None:
    """Every module, and the functions that README's table of modules names."""
    for name in exported:
        if inspect.isclass(getattr(sinkwise.nn, name)) or name in sinkwise.__all__:
            assert getattr(sinkwise, name) is getattr(sinkwise.nn, name)
    assert {"sink_attention", "sink_mask", "common_mode_penalty"} <= set(sinkwise.__all__)


def test_nn_is_reached_from_the_facade_alone() -> None:
    code = "import sinkwise as sw; print(sw.nn.rescale.__name__, 'nn' in sw.__all__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["rescale", "False"]


def test_modules_and_mitigations_of_similar_names_are_two_things() -> None:
    assert sinkwise.Registers is not sinkwise.RegisterTokens
    assert sinkwise.SinkLogits is not sinkwise.SinkLogitAttention


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_name_only_what_exists(page: Path) -> None:
    text = page.read_text()
    assert set(re.findall(r"\bsw\.nn\.(\w+)", text)) <= set(exported)
    assert set(re.findall(r"\bsw\.(\w+)", text)) <= {*sinkwise.__all__, "nn"}


def test_pages_name_something() -> None:
    assert any("sw.GatedAttention" in page.read_text() for page in PAGES)
