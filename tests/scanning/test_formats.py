"""Saved scans of other versions: earlier ones load, newer ones are refused with one line."""

import json
import shutil
from pathlib import Path

import pytest

import sinkwise as sw
from sinkwise.reports.table import layer_rows
from sinkwise.scanning.result import FORMAT
from tests.planted import Planted, tokens

WITHOUT_FORMAT = Path(__file__).parent / "saved" / "without_format"
"""A scan of two samples by a tiny Llama without a BOS token, saved before scans had a format."""


@pytest.fixture(scope="module")
def found():
    return sw.scan(Planted([[0, 1]]), [tokens(2, 41, {0: [0], 1: [4]}, empty=[0])])


def rewritten(directory, **changes):
    """The folder with other entries in its scan.json."""
    file = directory / "scan.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return directory


def test_the_format_is_stated_first_and_is_not_part_of_the_scan(found, tmp_path):
    found.save(tmp_path / "scan")
    about = json.loads((tmp_path / "scan" / "scan.json").read_text())
    assert next(iter(about.items())) == ("format", FORMAT)
    kept = sw.Scan.load(tmp_path / "scan")
    assert kept.meta == found.meta and "format" not in kept.meta


def test_a_scan_without_a_format_loads(tmp_path):
    """It calls a causal model's first token `text`; everything else is as it is today."""
    assert "format" not in json.loads((WITHOUT_FORMAT / "scan.json").read_text())
    old = sw.Scan.load(WITHOUT_FORMAT)
    assert (len(old.events), len(old.heads), len(old.layers)) == (5, 4, 2)
    assert set(old.events["kind"]) == {"text"}
    verdict = old.verdict()
    assert "mostly on text tokens, on 75% of the inputs" in verdict.evidence[1]
    assert len(layer_rows(old)) == 2
    again = sw.Scan.load(old.save(tmp_path / "again"))
    assert again.meta == old.meta and again.events.equals(old.events)
    assert again.verdict().evidence == verdict.evidence


def test_it_may_be_replaced(found, tmp_path):
    shutil.copytree(WITHOUT_FORMAT, tmp_path / "scan")
    found.save(tmp_path / "scan")
    assert sw.Scan.load(tmp_path / "scan").meta == found.meta


def test_a_scan_of_a_newer_format_is_refused(found, tmp_path):
    folder = rewritten(found.save(tmp_path / "scan"), format=FORMAT + 1)
    (folder / "events.parquet").write_bytes(b"something else by then")
    with pytest.raises(sw.InputError) as caught:
        sw.Scan.load(folder)
    assert str(caught.value) == (
        f"{str(folder)!r} is a scan in format {FORMAT + 1}, and this version of sinkwise reads "
        f"formats up to {FORMAT}: update sinkwise, or scan again"
    )


@pytest.mark.parametrize("nonsense", ["new", None, [1], {}])
def test_a_format_that_is_no_number_is_refused(found, tmp_path, nonsense):
    folder = rewritten(found.save(tmp_path / "scan"), format=nonsense)
    with pytest.raises(sw.InputError, match="is no saved scan"):
        sw.Scan.load(folder)
    (folder / "scan.json").write_text("[1, 2]")
    with pytest.raises(sw.InputError, match="is no saved scan"):
        sw.Scan.load(folder)
