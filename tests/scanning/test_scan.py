"""What a scan accepts, refuses and leaves behind, and how it is saved."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sinkwise as sw
from sinkwise.scanning.observer import Observer
from sinkwise.storage.versions import versions
from tests.planted import DIM, Planted, PlantedAttention, kinds, tokens

LAYOUT = kinds("cls", "register", rest="patch")


def model_and_batch():
    return Planted([[0, 1], [None, 0]]), tokens(3, 41, {0: [0], 1: [4]}, empty=[0])


def equal(one, other):
    return all(
        getattr(one, name).equals(getattr(other, name)) for name in ("events", "heads", "layers")
    )


class Arguments(nn.Module):
    """Takes its input as two named arguments."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden, scale=None, *, flag=False):
        assert not torch.is_grad_enabled() and not self.training
        assert flag in (False, "yes")
        return self.inner(hidden if scale is None else hidden * scale)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: x,
        lambda x: (x,),
        lambda x: [x],
        lambda x: (x, torch.ones(())),
        lambda x: {"hidden": x},
        lambda x: {"hidden": x, "scale": torch.ones(DIM), "flag": "yes"},
    ],
)
def test_batches_of_every_form(wrap):
    model, x = model_and_batch()
    seen = []
    found = sw.scan(Arguments(model), [wrap(x[:2]), wrap(x[2:])], progress=seen.append)
    assert equal(found, sw.scan(Arguments(model), (part for part in x.split(2))))
    assert found.meta["samples"] == 3 and len(found.events) == 9
    assert seen == [2, 3]


def test_the_layout_names_tokens():
    model, x = model_and_batch()
    batches = [{"x": x[:2]}, {"x": x[2:]}]
    named = sw.scan(model, batches, layout=lambda batch: LAYOUT(batch["x"]))
    assert set(named.events.filter(pl.col("token") == 0)["kind"]) == {"cls"}
    assert set(named.events.filter(pl.col("token") == 4)["kind"]) == {"patch"}
    row = named.layers.row(0, named=True)
    total = row["received_cls"] + row["received_register"] + row["received_patch"]
    assert total == pytest.approx(1.0, abs=1e-5)
    unnamed = sw.scan(model, batches, layout=lambda _: None)
    assert set(unnamed.events.filter(pl.col("token") > 0)["kind"]) == {"other"}
    assert set(unnamed.events.filter(pl.col("token") == 0)["kind"]) == {"first"}


def test_meta_says_where_the_numbers_are_from():
    model, x = model_and_batch()
    meta = sw.scan(model, [x]).meta
    assert meta["model"] == meta["class"] == "Planted" and meta["samples"] == 3
    assert meta["parameters"] == sum(p.numel() for p in model.parameters())
    assert meta["rules"] == sw.Rules().describe()
    assert meta["versions"] == versions() and torch.__version__.startswith(
        meta["versions"]["torch"]
    )
    assert meta["sites_measured"] == meta["sites_unknown"] == meta["calls_skipped"] == []
    assert meta["nonfinite"] == 0
    assert json.loads(json.dumps(meta)) == meta


class Failing(Planted):
    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 1:
            raise RuntimeError("out of luck")
        return super().forward(x)


@pytest.mark.parametrize("kind", [Planted, Failing])
def test_the_model_comes_back_as_it_was(kind):
    """Training flags per module, gradients, hooks, weights and outputs; also after an error."""
    _, x = model_and_batch()
    model = kind([[0, 1], [None, 0]])
    model.train()
    model.layers[0].attn.eval()
    model.layers[1].attn.v_proj.eval()
    model.layers[1].attn.k_proj.requires_grad_(False)
    flags = [m.training for m in model.modules()]
    assert len(set(flags)) == 2
    grads = [p.requires_grad for p in model.parameters()]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    before = Planted.forward(model, x)
    if kind is Failing:
        with pytest.raises(RuntimeError, match="out of luck"):
            sw.scan(model, [x, x])
    else:
        sw.scan(model, [x, x])
    assert [m.training for m in model.modules()] == flags
    assert [p.requires_grad for p in model.parameters()] == grads
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert model.state_dict().keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert torch.is_grad_enabled() and torch.equal(Planted.forward(model, x), before)


class Pooling(nn.Module):
    """Attention pooling: one learned query over the tokens."""

    def __init__(self):
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 1, 1, DIM))

    def forward(self, x):
        query = self.query.expand(x.shape[0], -1, -1, -1)
        return F.scaled_dot_product_attention(query, x[:, None], x[:, None])


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.pool = Planted([[0]]), Pooling()

    def forward(self, x):
        return self.pool(self.body(x))


def test_nothing_to_see_is_an_error():
    x = torch.randn(2, 5, DIM)
    with pytest.raises(sw.CaptureError, match="no softmax attention was seen in Sequential"):
        sw.scan(nn.Sequential(nn.Linear(DIM, 7), nn.GELU()), [x])
    with pytest.raises(sw.CaptureError, match=r"no attention over tokens .* skipped: pool"):
        sw.scan(Only(), [x])
    found = sw.scan(Pooled(), [tokens(2, 41, {0: [0]})])
    assert found.meta["calls_skipped"] == ["pool"]
    assert set(found.heads["name"]) == {"body.layers.0.attn"}


class Only(nn.Module):
    def __init__(self):
        super().__init__()
        self.pool = Pooling()

    def forward(self, x):
        return self.pool(x)


@pytest.mark.parametrize("empty", [[], (), iter([])])
def test_no_batches(empty):
    model, _ = model_and_batch()
    model.train()
    with pytest.raises(sw.InputError, match="batches is empty"):
        sw.scan(model, empty)
    assert all(m.training for m in model.modules())


@pytest.mark.parametrize(
    ("batches", "name"), [(torch.zeros(2, 5, DIM), "Tensor"), ({"x": 1}, "dict"), ("text", "str"),
                          (7, "int"), (None, "NoneType")],
)  # fmt: skip
def test_what_is_no_iterable_of_batches(batches, name):
    with pytest.raises(sw.InputError, match=f"batches is a {name}; .*list of what the model takes"):
        sw.scan(model_and_batch()[0], batches)


def test_other_wrong_inputs(tmp_path):
    model, x = model_and_batch()
    with pytest.raises(sw.InputError, match="a batch holds no tensor"):
        sw.scan(model, [("a", 1)])
    with pytest.raises(sw.InputError, match="rule='often' is unknown"):
        sw.scan(model, [x], rules="often")
    (tmp_path / "text.txt").write_text("word " * 99)
    with pytest.raises(sw.InputError, match=r"tokenizer, and Planted has none"):
        sw.scan(model, sw.text(tmp_path / "text.txt", length=8))


# Saving


@pytest.fixture(scope="module")
def found():
    model, x = model_and_batch()
    return sw.scan(model, [x])


@pytest.fixture(scope="module")
def other():
    model, x = model_and_batch()
    return sw.scan(model, [x[:2]])


def files(directory):
    return sorted(str(p.relative_to(directory)) for p in Path(directory).rglob("*"))


SAVED = ["events.parquet", "heads.parquet", "layers.parquet", "scan.json"]


def test_a_scan_is_saved_and_replaced(found, other, tmp_path):
    target = tmp_path / "deep" / "scan"
    assert found.save(target) == target and files(target) == SAVED
    assert equal(sw.Scan.load(str(target)), found)
    other.save(str(target))
    assert equal(sw.Scan.load(target), other) and files(target) == SAVED
    assert files(target.parent) == ["scan", *[f"scan/{name}" for name in SAVED]]
    (tmp_path / "empty").mkdir()
    assert equal(sw.Scan.load(found.save(tmp_path / "empty")), found)


def test_what_is_no_scan_is_never_replaced(found, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    (tmp_path / "file").write_text("keep")
    for name in ("mine", "file"):
        with pytest.raises(sw.InputError, match="exists and is no scan; give a new directory"):
            found.save(tmp_path / name)
    assert files(tmp_path) == ["file", "mine", "mine/notes.txt"]
    with pytest.raises(sw.InputError, match="could not be written"):
        found.save(tmp_path / "file" / "scan")


def test_what_is_no_scan_is_never_loaded(found, tmp_path):
    with pytest.raises(sw.InputError, match="is no saved scan"):
        sw.Scan.load(tmp_path / "nothing")
    target = found.save(tmp_path / "scan")
    (target / "heads.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(sw.InputError, match="is no saved scan"):
        sw.Scan.load(target)
    found.save(target)
    (target / "scan.json").write_text("{")
    with pytest.raises(sw.InputError, match="is no saved scan"):
        sw.Scan.load(target)


FULL = """
import resource, sys
import polars as pl
import sinkwise as sw
source, target, limit = sys.argv[1:]
found = sw.Scan.load(source)
big = sw.Scan(pl.concat([found.events] * 3000), found.heads, found.layers, found.meta)
big = sw.Scan(
    big.events.with_columns(received=pl.Series(range(len(big.events))).cast(pl.Float32).sin()),
    found.heads, found.layers, found.meta,
)
if int(limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
try:
    big.save(target)
except sw.InputError as error:
    print("InputError", error)
"""


def save_on_full_disk(source, target, limit):
    command = [sys.executable, "-c", FULL, str(source), str(target), str(limit)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("limit", [0, 16384])
def test_a_file_size_limit(found, tmp_path, old, limit):
    """All or nothing if the system stops a write half-way; without the limit it succeeds."""
    source = found.save(tmp_path / "source")
    target = tmp_path / "there" / "scan"
    if old:
        found.save(target)
    result = save_on_full_disk(source, target, limit)
    assert result.returncode == 0, result.stderr
    if not limit:
        assert result.stdout == "" and len(sw.Scan.load(target).events) == 3000 * 9
        return
    assert result.stdout.startswith(f"InputError out={str(target)!r} could not be written: ")
    assert len(result.stdout.splitlines()) == 1
    assert files(target.parent) == (["scan", *[f"scan/{n}" for n in SAVED]] if old else [])
    assert not old or equal(sw.Scan.load(target), found)


def test_a_full_disk(found, tmp_path):
    source, disk = found.save(tmp_path / "source"), tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    try:
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting a small tmpfs is not allowed here")
    except FileNotFoundError:
        pytest.skip("no mount command here")
    try:
        target = found.save(disk / "scan")
        result = save_on_full_disk(source, target, 0)
        assert "could not be written" in result.stdout, result.stderr
        assert equal(sw.Scan.load(target), found)
        assert files(disk) == ["scan", *[f"scan/{name}" for name in SAVED]]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_numbers_are_finite_or_said_to_be_missing(found):
    assert np.isfinite(found.events.select(pl.col(pl.Float32)).to_numpy()).all()
    assert found.heads.filter(pl.col("verdict") == "none")["value_ratio"].null_count() == 1


def test_attention_that_is_the_model_itself():
    """No block, no residual: the call has an empty module name, and no residual stream is known."""
    found = sw.scan(PlantedAttention([0, None]), [tokens(2, 41, {0: [0]})])
    assert found.heads.select("layer", "name", "sink_share").rows() == [(0, "", 1.0), (0, "", 0.0)]
    assert found.events["token_norm_ratio"].is_nan().all()
    assert found.layers["token_norm_max"].to_list() == [None]


def test_a_rename_that_fails_leaves_the_old_scan(found, other, tmp_path, monkeypatch):
    target = found.save(tmp_path / "scan")
    calls, rename = [], os.replace

    def second_fails(source, place):
        calls.append(place)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        rename(source, place)

    monkeypatch.setattr(os, "replace", second_fails)
    with pytest.raises(sw.InputError, match="Input/output error"):
        other.save(target)
    monkeypatch.undo()
    assert equal(sw.Scan.load(target), found)
    assert files(tmp_path) == ["scan", *[f"scan/{name}" for name in SAVED]]


def test_what_else_lies_beside_a_scan_survives(found, other, tmp_path):
    target = found.save(tmp_path / "scan")
    (target / "report.html").write_text("mine")
    other.save(target)
    assert (target / "report.html").read_text() == "mine"


def test_masks_of_a_batch_are_dropped_with_it(monkeypatch):
    held = {"begin": [], "end": []}

    def watch(name):
        original = getattr(Observer, name)

        def run(self, *given, **named):
            result = original(self, *given, **named)
            held[name].append(len(self._meter.visibility))
            return result

        monkeypatch.setattr(Observer, name, run)

    watch("begin")
    watch("end")
    model, x = model_and_batch()
    sw.scan(model, [x[:2], x[2:]])
    assert len(held["begin"]) == len(held["end"]) >= 2
    assert set(held["begin"]) == {0} and min(held["end"]) > 0
