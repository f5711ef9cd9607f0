"""Many processes give what one gives, to the last bit; and all of them end when one fails."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import sinkwise as sw
from sinkwise.cli.processes import check_processes, processes
from sinkwise.errors import InputError
from sinkwise.measure.sums import CallSums, Part, StreamSums
from sinkwise.reports.notes import notes
from sinkwise.scanning.batch_store import Parts
from tests.planted import OddAttention, Planted, tokens
from tests.scanning.test_resume import LAYOUT, SIZES, Counting, batches, scan
from tests.scans import COMMAND, ENVIRONMENT, identical, models, pictures, sinkwise


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return models(tmp_path_factory.mktemp("scale"))


# Shares


def shared(world, parts, order=None, kind=None, **options):
    """A scan by `world` processes, one after another in `order`; (scan, samples of each)."""

    def model():
        return Counting() if kind is None else Counting(kind=kind)

    options = {"layout": LAYOUT, "parts": parts, **options}
    samples = [
        sw.scan_share(model(), batches(), shard=(rank, world), **options)
        for rank in order or range(world)
    ]
    last = model()
    return sw.scan(last, batches(), **options), samples, last.runs


@pytest.mark.parametrize(("world", "order"), [(2, (1, 0)), (3, (0, 1, 2)), (7, None)])
def test_shares_are_the_whole(tmp_path, world, order):
    """Whatever order they come in, with more of them than batches, with uneven batches."""
    found, samples, runs = shared(world, tmp_path, order)
    identical(found, scan())
    assert sum(samples) == sum(SIZES) and runs == 0


def test_a_share_is_a_share(tmp_path):
    lines, seen = [], []
    options = {"layout": LAYOUT, "parts": tmp_path, "shard": (1, 2)}
    model = Counting()
    number = sw.scan_share(model, batches(), progress=seen.append, **options)
    assert number == SIZES[1] + SIZES[3] and seen == [3, 5]
    assert model.runs == 1 + 2  # a look at the very first sample
    again = Counting()
    assert sw.scan_share(again, batches(), tell=lines.append, **options) == number
    assert again.runs == 0 and lines == []  # only the first process tells
    for shard in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(InputError, match="0 <= rank < world"):
            sw.scan_share(model, batches(), parts=tmp_path, shard=shard)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_measured_weights_are_the_same_in_every_share(tmp_path, order):
    found, _, _ = shared(2, tmp_path, order, kind=OddAttention)
    assert found.meta["sites_measured"] == ["layers.0.attn", "layers.1.attn"]
    assert not found.events["value_ratio"].is_nan().any()
    identical(found, scan(Counting(kind=OddAttention)))


def test_that_comparison_can_fail(tmp_path, monkeypatch):
    """Two parts that are swapped give another scan, and are read only if nobody looks."""
    found, _, _ = shared(2, tmp_path)
    for ending in ("json", "arrow"):
        one, other = (next(tmp_path.glob(f"*/0000000{n}.{ending}")) for n in (1, 2))
        content = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(content)
    with monkeypatch.context() as patch:
        read = Parts.read
        patch.setattr(Parts, "read", lambda self, index, _: read(self, index, key(self, index)))
        swapped = scan(parts=tmp_path)
    with pytest.raises(AssertionError, match="events"):
        identical(swapped, found)
    identical(scan(parts=tmp_path), found)


def key(parts, index):
    """The key that a part has, whatever it should have."""
    return json.loads(parts._file(index, "json").read_text().partition("\n")[2])["key"]


def sums(value):
    """A part of one sample with these sums."""
    call = CallSums(1, 1, np.full(8, value), value, value, value, {"text"})
    stream = StreamSums(samples=1, token_norm_max=value, token_norm_max_token=3)
    stream.sums["token_norm_median"], stream.counts["token_norm_median"] = value, 1
    return Part(1, {(0, "attn"): call}, {0: stream})


def test_sums_are_added_up_in_the_order_of_batches():
    """Floats: ((1 + 1e16) - 1e16) is 0, and in another order 1. Only one order is ever used."""
    for values, wanted in (((1.0, 1e16, -1e16), 0.0), ((1e16, -1e16, 1.0), 1.0)):
        total = Part()
        for value in values:
            total.append(sums(value))
        entry = total.calls[0, "attn"]
        assert entry.first_sum == entry.kind_sum[0] == entry.kind_count == wanted
        assert total.streams[0].sums["token_norm_median"] == wanted
        assert entry.samples == total.samples == 3
        assert total.streams[0].token_norm_max == 1e16


def test_appending_leaves_the_later_part_alone():
    later = sums(2.0)
    total = Part()
    total.append(later)
    total.append(sums(5.0))
    assert later.calls[0, "attn"].kind_sum[0] == 2.0 and later.streams[0].samples == 1


def test_pictures_of_other_shares_are_not_opened(tmp_path, monkeypatch):
    model = sw.load(str(models(tmp_path) / "vision"))
    inputs = sw.images(tmp_path / "photos", batch_size=2)
    opened, really = [], Image.open

    def counting(file, *rest):
        opened.append(Path(file).name)
        return really(file, *rest)

    monkeypatch.setattr(Image, "open", counting)
    sw.scan_share(model, inputs, parts=tmp_path / "parts", shard=(1, 2))
    assert opened == ["0.png", "2.png", "3.png"]  # the first one says whose weights are unknown
    opened.clear()
    sw.scan_share(model, inputs, parts=tmp_path / "parts", shard=(0, 2))
    assert opened == ["0.png", "1.png", "4.png"]
    opened.clear()
    found = sw.scan(model, inputs, parts=tmp_path / "parts")
    assert opened == []
    identical(found, sw.scan(model, inputs))
    (tmp_path / "photos" / "3.png").touch()
    lines = []
    sw.scan(model, inputs, parts=tmp_path / "parts", tell=lines.append)
    assert len(lines) == 1 and "inputs changed" in lines[0]


def test_text_of_other_shares_is_not_made_into_tensors(folder, tmp_path):
    model = sw.load(str(folder / "text"))
    inputs = sw.text(folder / "book.txt", length=60, samples=9, batch_size=2)
    seen = []
    model.register_forward_pre_hook(
        lambda module, args, named: seen.append(len(named["input_ids"])), with_kwargs=True
    )
    screen = sw.Screen(rows=9, stratum_rows=3)
    for rank in (1, 0):
        sw.scan_share(model, inputs, parts=tmp_path, shard=(rank, 2), screen=screen)
    assert seen == [1, 2, 2, 2, 2, 1]
    found = sw.scan(model, inputs, parts=tmp_path, screen=screen)
    assert found.meta["screen"]["calls"] == {"screened": 2 * 5, "exact": 0}
    identical(found, sw.scan(model, inputs, screen=screen))


def test_memory_does_not_grow_with_shares(tmp_path):
    """A share holds no more after twenty batches than after four."""
    import gc

    counts = []

    def many():
        for seed in range(24):
            yield tokens(2, 41, {0: [0], 1: [2]}, seed=seed)

    done = []

    def count(samples):
        done.append(samples)
        if len(done) not in (3, 12):
            return
        gc.collect()
        kept = (torch.Tensor, np.ndarray, Part)
        counts.append(sum(issubclass(type(o), kept) for o in gc.get_objects()))

    model = Planted([[0, 1]] * 2)
    sw.scan_share(model, many(), parts=tmp_path, shard=(1, 2), progress=count)
    assert len(counts) == 2 and counts[0] == counts[1]


# Two gloo processes through the API

GLOO = """
import sys
import torch.distributed as dist
import sinkwise as sw
from tests.scanning.test_resume import Counting, batches, LAYOUT
rank, port, parts, out = int(sys.argv[1]), *sys.argv[2:]
dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
assert sw.scan_share(Counting(), batches(), layout=LAYOUT, parts=parts, shard=(rank, 2))
dist.barrier()
if rank == 0:
    model = Counting()
    sw.scan(model, batches(), layout=LAYOUT, parts=parts).save(out)
    assert model.runs == 0
dist.barrier()
dist.destroy_process_group()
"""


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def test_two_gloo_processes(tmp_path):
    port, root = free_port(), Path(__file__).parents[2]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", GLOO, str(rank), port, tmp_path / "parts", tmp_path / "out"],
            cwd=root, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in processes:
        assert process.wait(timeout=90) == 0, process.stderr.read()
        process.stderr.close()
    identical(sw.Scan.load(tmp_path / "out"), scan())


# The command

TEXT = ["text", "--text", "book.txt", "--length", "40", "--samples", "9", "--batch-size", "2"]
VISION = ["vision", "--images", "photos", "--batch-size", "1"]


@pytest.mark.parametrize("options", [TEXT, VISION], ids=["text", "vision"])
def test_two_processes_give_what_one_gives(folder, options):
    """Five batches, the last of the text's smaller, on two processes that Fabric starts."""
    name = options[0]
    two = sinkwise(*options, "--json", "--devices", 2, "--out", f"{name}-2", cwd=folder)
    assert two.returncode == 0, two.stderr
    assert json.loads(two.stdout)["samples"] == (9 if name == "text" else 5)
    assert two.stderr.count("Loading weights:   0%") <= 1 and "sinkwise" not in two.stderr
    assert not list(folder.glob(".*-parts"))
    model = sw.load(str(folder / name))
    inputs = sw.text(folder / "book.txt", length=40, samples=9, batch_size=2)
    if name == "vision":
        inputs = sw.images(folder / "photos", batch_size=1)
    one = sw.scan(model, inputs)
    assert len(one.events) > 9
    one.meta["model"] = name
    identical(sw.Scan.load(folder / f"{name}-2"), one)
    assert (folder / f"{name}-2" / "heads.png").is_file()


def test_two_machines(folder):
    """The same command on each of two machines, here both this one."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    processes = [
        subprocess.Popen(
            [*COMMAND, *TEXT, "--num-nodes", "2", "--out", "nodes", "--json"],
            cwd=folder, env={**ENVIRONMENT, **common, "NODE_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    told = [process.communicate(timeout=90) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], told
    assert json.loads(told[0][0])["samples"] == 9 and told[1][0] == ""


@pytest.mark.parametrize("broken", [2, 3])
def test_a_failure_ends_all(tmp_path, broken):
    """A picture that cannot be read, in either process's share: one line, soon, nobody is left."""
    models(tmp_path)
    photos = pictures(tmp_path / "more", 8)
    (photos / f"{broken}.png").write_bytes(b"no picture")
    options = ["vision", "--images", "more", "--batch-size", "1", "--devices", "2"]
    start = time.monotonic()
    done = sinkwise(*options, cwd=tmp_path)
    assert done.returncode == 2 and time.monotonic() - start < 45
    told = [line for line in done.stderr.splitlines() if "sinkwise: " in line]
    assert len(told) == 1 and f"picture 'more/{broken}.png' cannot be read" in told[0]
    assert "Traceback" not in done.stderr and not (tmp_path / "scan").exists()
    assert children(tmp_path) == []
    assert not list(tmp_path.glob(".scan-parts/failed*"))


def children(cwd):
    """Processes of the command that run in a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            alive = (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
            if b"diagnose" in words and os.readlink(process / "cwd") == str(cwd) and alive:
                found.append(int(process.name))
        except OSError:
            continue
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("victim", ["first", "second"])
def test_a_killed_process_ends_all(folder, tmp_path, victim):
    """The second one's end is told; with the first one's, the second ends too."""
    for name in ("text", "book.txt"):
        (tmp_path / name).symlink_to(folder / name)
    options = ["text", "--text", "book.txt", "--length", "3", "--samples", "9000"]
    process = subprocess.Popen(
        [*COMMAND, *options, "--batch-size", "1", "--devices", "2"],
        cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while process.poll() is None and not list(tmp_path.glob(".scan-parts/*/00000001.json")):
        time.sleep(0.02)
    others = [pid for pid in children(tmp_path) if pid != process.pid]
    assert len(others) == 1
    os.kill(process.pid if victim == "first" else others[0], signal.SIGKILL)
    _, told = process.communicate(timeout=30)
    if victim == "second":
        assert process.returncode == 2 and told.count("sinkwise: a process ended by signal 9") == 1
    end = time.monotonic() + 10
    while children(tmp_path) and time.monotonic() < end:
        time.sleep(0.05)
    assert children(tmp_path) == []


def test_fabric_is_imported_for_many_processes_only(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning_fabric", None)
    with processes(1, 1, "cpu", tmp_path, print) as group:
        group.wait()
        assert (group.rank, group.world, group.device) == (0, 1, "cpu")
    with pytest.raises(InputError, match=r"pip install 'sinkwise\[scale\]'"):
        with processes(2, 1, "cpu", tmp_path, print):
            pass


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 1, "cpu"), "--devices must be at least 1; got 0"),
        ((1, 0, "cpu"), "--num-nodes must be at least 1; got 0"),
        ((2, 1, "cuda:1"), "--device must be cpu or cuda for several processes; got cuda:1"),
        ((2, 1, "mps"), "--device must be cpu or cuda for several processes; got mps"),
        ((99, 1, "cuda"), "--devices must be at most [0-9]+, the CUDA devices here; got 99"),
        ((1, 2, "cpu"), "--num-nodes 2 needs MASTER_ADDR"),
    ],
)
def test_processes_that_cannot_be(arguments, words, monkeypatch):
    for name in ("MASTER_ADDR", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match=words):
        check_processes(*arguments)
    check_processes(1, 1, "cuda:7")


def test_a_mistake_is_told_by_the_command(folder):
    done = sinkwise(*TEXT, "--devices", 0, cwd=folder)
    assert done.returncode == 2 and "sinkwise: --devices must be at least 1; got 0" in done.stderr


# What a reader is told


def test_notes():
    empty = scan().meta
    assert notes(empty) == []
    (line,) = notes(scan(screen=True).meta)
    assert line.startswith(
        "Of 10 attention calls, 10 were measured in full and 0 were screened with 192 sampled "
        "queries (causal calls: 64 per stratum)."
    )
    assert line.endswith("the probability of missing a given sink is at most 1e-06.")
    measured = {**empty, "sites_measured": ["a.b", "a.c"], "calls_skipped": [""]}
    assert notes(measured) == [
        "Unknown weight layout in 2 modules (a.b, ...): weights per head come from the Jacobian.",
        "Calls that are not attention over tokens in the model itself: left out.",
    ]
    rest = {**empty, "output_unknown": ["o"], "blocks_without_softmax_attention": ["h.0", "h.1"]}
    told = " ".join(notes(rest))
    assert "projection in o: its value ratios are raw" in told
    assert "No softmax attention in 2 modules (h.0, ...): not measured." in told
