"""An interrupted scan resumes, and gives the same result bit for bit as one without a break."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import sinkwise as sw
from sinkwise.attention.screen import Screen
from sinkwise.errors import InputError
from sinkwise.hosts.weights import weights_checksum
from sinkwise.scanning import batch_store as store
from sinkwise.scanning.batch_store import remove_parts
from sinkwise.scanning.fingerprint import facts
from tests.planted import OddAttention, Planted, kinds, tokens
from tests.scans import COMMAND, ENVIRONMENT, identical, models, sinkwise

LAYOUT = kinds("bos", rest="text")
SIZES = [1, 3, 1, 2, 1]
"""Samples of each batch: five batches of unequal sizes."""


def batches():
    x = tokens(sum(SIZES), 41, {0: [0], 1: [5], 3: [2]}, empty=[0, (1, 2), (5, 2)])
    x[4, 20, -1] = torch.nan  # a sample that is left out
    return list(x.split(SIZES))


class Counting(Planted):
    """Counts its forward passes."""

    def __init__(self, layers=((0, 1, None, 3), (1, 3, 0, None)), **options):
        super().__init__([list(targets) for targets in layers], **options)
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        return super().forward(x)


def scan(model=None, data=None, **options):
    return sw.scan(model or Counting(), data or batches(), layout=LAYOUT, **options)


@pytest.fixture(scope="module")
def whole():
    found = scan()
    assert len(found.events) > 20 and found.meta["nonfinite"] > 0
    return found


class Killed(BaseException):
    """In place of the end of the process."""


@pytest.mark.parametrize("half", [False, True])
def test_killed_at_any_write(whole, tmp_path, monkeypatch, half):
    """Before any file is written and, worse than can happen, with half of it written."""
    write = store.write_bytes
    for number in (0, 1, 2, 7):
        calls = []

        def dying(path, content, calls=calls, number=number):
            calls.append(path)
            if len(calls) > number:
                if half:
                    path.write_bytes(content[: len(content) // 2])
                raise Killed
            write(path, content)

        folder = tmp_path / str(number)
        with monkeypatch.context() as patch:
            patch.setattr(store, "write_bytes", dying)
            with pytest.raises(Killed):
                scan(parts=folder)
        model = Counting()
        identical(scan(model, parts=folder), whole)
        finished = max(0, (number - 1) // 2)
        assert model.runs == len(SIZES) - finished


def test_a_finished_scan_is_read_back_and_removed(whole, tmp_path):
    lines = []
    identical(scan(parts=tmp_path / "parts", tell=lines.append), whole)
    assert lines == []
    model = Counting()
    identical(scan(model, parts=tmp_path / "parts", tell=lines.append), whole)
    assert model.runs == 0
    assert lines == [f"resuming: 5 finished batches found in {tmp_path / 'parts'}/"]
    (tmp_path / "parts" / "notes.txt").write_text("mine")
    remove_parts(tmp_path / "parts")
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["notes.txt"]
    (tmp_path / "parts" / "notes.txt").unlink()
    remove_parts(tmp_path / "parts")
    assert not (tmp_path / "parts").exists()
    remove_parts(tmp_path / "parts")


def files(folder, ending):
    return sorted(path for path in folder.glob(f"*/*.{ending}") if path.stem != "scan")


def damaged(kind, path):
    content = path.read_bytes()
    if kind == "cut":
        return content[: len(content) // 2]
    if kind == "empty":
        return b""
    if kind == "bit":
        middle = len(content) // 2
        return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    return None


@pytest.mark.parametrize("ending", ["json", "arrow"])
@pytest.mark.parametrize("kind", ["cut", "empty", "bit", "gone"])
def test_a_damaged_batch_is_measured_again(whole, tmp_path, ending, kind):
    scan(parts=tmp_path)
    path = files(tmp_path, ending)[2]
    content = damaged(kind, path)
    path.unlink() if content is None else path.write_bytes(content)
    model = Counting()
    identical(scan(model, parts=tmp_path), whole)
    assert model.runs == 1


def changes():
    other = Counting()
    other.layers[1].attn.v_proj.weight.data[0, 6] += 1e-3
    gain = Counting()
    gain.layers[0].attn.scale = 0.25  # no weight at all: only its repr tells
    gain.extra_repr = lambda: "scale=0.25"
    return {
        "weights": {"model": other},
        "structure": {"model": gain},
        "rules": {"rules": "literal"},
        "screen": {"screen": Screen(rows=7, stratum_rows=9)},
    }


@pytest.mark.parametrize("name", changes())
def test_what_changed_starts_over(tmp_path, name):
    scan(parts=tmp_path)
    change, lines = changes()[name], []
    model = change.pop("model", Counting())
    found = scan(model, parts=tmp_path, tell=lines.append, **change)
    assert model.runs == len(SIZES)
    identical(found, scan(changes()[name].get("model"), **change))
    assert lines == [f"starting over: {name} changed since the batches in {tmp_path}/"]
    assert len(list(tmp_path.iterdir())) == 1


def test_another_batch_is_measured_again(tmp_path):
    """A list is not described by its source: each batch is compared by its content."""
    scan(parts=tmp_path)
    data = batches()
    data[3] = data[3].clone()
    data[3][0, 7, 8] += 1e-6
    model = Counting()
    identical(scan(model, data, parts=tmp_path), scan(data=data))
    assert model.runs == 1


def test_another_layout_starts_over(tmp_path):
    scan(parts=tmp_path)
    other = sw.scan(Counting(), batches(), parts=tmp_path)
    identical(other, sw.scan(Counting(), batches()))


def test_measured_weights_are_learned_again(tmp_path):
    """Every process that resumes takes the Jacobian on the same first sample."""
    plain = scan(Counting(kind=OddAttention))
    assert len(plain.meta["sites_measured"]) == 2
    scan(Counting(kind=OddAttention), parts=tmp_path)
    for number in (1, 0):
        files(tmp_path, "json")[number].unlink()
        identical(scan(Counting(kind=OddAttention), parts=tmp_path), plain)
    files(tmp_path, "json")[1].unlink()
    files(tmp_path, "json")[0].unlink()
    identical(scan(Counting(kind=OddAttention), parts=tmp_path), plain)


def test_batches_of_another_basis_are_measured_again(tmp_path, monkeypatch):
    """A process with other weights has measured something else."""
    with monkeypatch.context() as patch:
        patch.setattr("sinkwise.scanning.basis.measured_sites", lambda *_: {})
        sw.scan_share(
            Counting(kind=OddAttention), batches(), layout=LAYOUT, parts=tmp_path, shard=(1, 2)
        )
    model = Counting(kind=OddAttention)
    identical(scan(model, parts=tmp_path), scan(Counting(kind=OddAttention)))
    assert model.runs == 1 + 1 + 1 + 4  # the first batch twice, and once for its Jacobian


def test_the_checksum_of_weights():
    """It depends on every bit, on names and shapes; an equal copy has the same."""
    model = Counting()
    first = weights_checksum(model)
    assert weights_checksum(Counting()) == first
    weight = model.layers[0].attn.k_proj.weight
    for place in range(weight.numel()):
        with torch.no_grad():
            kept = weight.view(-1)[place].item()
            weight.view(-1)[place] += 1e-3
            assert weights_checksum(model) != first
            weight.view(-1)[place] = kept
    assert weights_checksum(model) == first
    assert weights_checksum(model.to(torch.bfloat16)) != first
    mixed = torch.nn.ParameterDict({"b": torch.ones(2), "c": torch.ones(3, dtype=torch.complex64)})
    assert weights_checksum(mixed) != weights_checksum(mixed.double())


def test_facts_have_no_addresses():
    """They are equal in every process: they contain no memory address."""
    model, told = Counting(), []
    for _ in range(2):
        function = lambda: 1  # noqa: E731
        model.extra_repr = lambda function=function: f"activation={function!r}"
        assert " at 0x" in repr(model)
        nested = lambda batch: [LAYOUT(x) for x in batch]  # noqa: E731
        told.append(facts(model, "x", {}, sw.Rules(), None, nested, torch.device("cpu")))
        told.append(function)  # alive, so that the next one lies elsewhere
    assert told[0] == told[2] and " at 0x" not in json.dumps(told[0])


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="could not be written"):
        scan(parts=tmp_path / "file" / "parts")


SCRIPT = """
import os, signal, sys
from tests.scanning.test_resume import Counting, batches, LAYOUT
import sinkwise as sw
done = []
def progress(samples):
    done.append(samples)
    if len(done) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
sw.scan(Counting(), batches(), layout=LAYOUT, parts=sys.argv[1], progress=progress)
"""


def test_a_killed_process_resumes(whole, tmp_path):
    """After SIGKILL, in another process: the facts do not depend on the process."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), "3"]
    done = subprocess.run(command, cwd=root, env=ENVIRONMENT, capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    model = Counting()
    identical(scan(model, parts=tmp_path), whole)
    assert model.runs == 2


def test_the_command_resumes(tmp_path):
    models(tmp_path)
    options = ["text", "--text", "book.txt", "--length", "12", "--samples", "61"]
    options += ["--batch-size", "1", "--screen"]
    process = subprocess.Popen(
        [*COMMAND, *options, "--out", "a"], cwd=tmp_path, env=ENVIRONMENT,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while process.poll() is None and len(files(tmp_path / ".a-parts", "json")) < 7:
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -signal.SIGKILL and not (tmp_path / "a").exists()
    kept = len(files(tmp_path / ".a-parts", "json"))
    assert 7 <= kept < 61
    done = sinkwise(*options, "--out", "a", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = f"sinkwise: resuming: {kept} finished batches found in {tmp_path}/.a-parts/"
    assert [line for line in done.stderr.splitlines() if "sinkwise" in line] == [told]
    assert "probability of missing a given sink is at most 1e-06" in " ".join(done.stdout.split())
    assert not (tmp_path / ".a-parts").exists()
    inputs = sw.text(tmp_path / "book.txt", length=12, samples=61, batch_size=1)
    fresh = sw.scan(sw.load(str(tmp_path / "text")), inputs, screen=True)
    fresh.meta["model"] = "text"
    fresh.save(tmp_path / "b")
    assert {*os.listdir(tmp_path / "a")} == {*os.listdir(tmp_path / "b"), "heads.png"}
    identical(sw.Scan.load(tmp_path / "a"), fresh)
    one, other = ((tmp_path / name / "scan.json").read_bytes() for name in "ab")
    assert one == other
