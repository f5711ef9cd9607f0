"""Every example runs, prints a result, and is a page of the site."""

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

PRINTS = {
    "01_find_sinks_in_a_vit": ["heads have a sink by the default rule", "Prescription:"],
    "02_find_sinks_in_a_language_model": ["Prescription: gate", "the last token gives"],
    "03_add_gates_to_your_timm_training": [
        "gated:  accuracy 1.00",
        "gates of the heads",
        "loaded again: VisionTransformer",
    ],
    "04_endless_chat": ["tokens so far"],
    "05_your_own_module": ["record_gives_the_output            passed", "head 0: token 0", "nop"],
}
"""What each must say, by its name."""
ARGUMENTS = {"04_endless_chat": ["--max-new-tokens", "3"]}


def test_all_are_numbered_and_known() -> None:
    assert [path.stem for path in EXAMPLES] == list(PRINTS)
    navigation = (ROOT / "mkdocs.yml").read_text()
    for path in EXAMPLES:
        assert f"examples/{path.stem}.md" in navigation


@pytest.mark.weights
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["Hello there\n", "\n"])
    monkeypatch.setattr(sys.stdin, "readline", lambda: next(lines), raising=False)
    monkeypatch.setattr(sys, "argv", [str(path), *ARGUMENTS.get(path.stem, [])])
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    for words in PRINTS[path.stem]:
        assert words in printed, printed
