"""docs/architectures.md is what its command prints."""

from pathlib import Path

import pytest

from .models import CASES, EXTRA, NO_ATTENTION
from .models.__main__ import HEAD, TAIL, architecture, kernel, names, row, without
from .models.nn_models import STATE_SPACE

pytestmark = pytest.mark.filterwarnings("ignore")
PAGE = (Path(__file__).parent.parent / "docs" / "architectures.md").read_text()


def table() -> dict[str, list[str]]:
    """The committed rows by name."""
    lines = PAGE[PAGE.index("| name |") : PAGE.index(TAIL)].splitlines()[2:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return {cells[0]: cells for cells in rows}


def test_every_model_has_a_row_and_no_other() -> None:
    assert list(table()) == names()
    assert len({cells[1] for cells in table().values()}) >= 50


def test_rows_say_what_the_models_are_tested_for() -> None:
    for case in CASES + EXTRA:
        _, _, _, kernels, calls, causal, source, sites, silent, _ = table()[architecture(case.name)]
        assert kernel(case) in kernels.split(", ")
        assert int(calls) == len(case.layers)
        assert causal in ("", str(sum(case.each("causal"))))
        assert ("map" in source) == (not all(case.each("faithful")))
        assert len([name for name in silent.split(", ") if name]) == case.silent
        assert sites


@pytest.mark.parametrize("name", ["llama", "qwen3-next", "gpt-oss", "timm-cait", "nn-mha-causal",
                                  "deepseek-v3", "dinov2-hub"])  # fmt: skip
def test_a_row_is_what_the_command_prints(name: str) -> None:
    assert row(name) in PAGE.splitlines()


def test_models_without_attention_are_named() -> None:
    assert PAGE.endswith(TAIL + "\n".join(without()) + "\n")
    for name in {**NO_ATTENTION, **STATE_SPACE}:
        assert f"| {name} | " in PAGE[PAGE.index(TAIL) :]


def test_the_page_opens_as_the_command_prints() -> None:
    before, after = HEAD.split("{versions}")
    assert PAGE.startswith(before) and after in PAGE
