"""Sums over batches and the frames they become."""

import gc
import weakref
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import timm
import torch
import transformers
from torch import nn

import sinkwise as sw
from sinkwise.core.layout import KINDS, TokenLayout
from sinkwise.measure.call import EVENT_FIELDS, CallStatistics
from sinkwise.measure.candidates import Keys
from sinkwise.measure.frames import EVENT_SCHEMA, Tables
from sinkwise.measure.residual import residual_statistics
from sinkwise.measure.sums import SampleSums
from tests.planted import Planted, PlantedAttention, PlantedBlock, kinds, tokens

EVERYTHING = sw.MeanRule(min_queries=1, min_times_uniform=0.0, threshold=0.0)
ALL = replace(sw.Rules(), causal=EVERYTHING, bidirectional=EVERYTHING)
"""Every visible token is an event, so that every number can be compared."""
MEANS = ("received_", "token_norm_median", "token_norm_first", "similarity_")


def same(one, other, tolerance=1e-6):
    """Counts and words are equal, floats up to `tolerance`."""
    assert one.schema == other.schema and len(one) == len(other)
    floats = [name for name, kind in one.schema.items() if kind.is_float()]
    assert one.drop(floats).equals(other.drop(floats))
    for name in floats:
        a, b = (np.array(frame[name], dtype=float) for frame in (one, other))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_batches_do_not_matter(size):
    """One by one, in pairs, in uneven batches or all at once: equal frames."""
    model = Planted([[0, 1, None, 3], [1, 3, 0, None]], kv_heads=2)
    x = tokens(7, 71, {0: [0], 1: [5], 3: [2]}, empty=[0, (1, 2), (5, 2)])
    layout = kinds("bos", rest="text")
    whole = sw.scan(model, [x], layout=layout)
    parts = sw.scan(model, x.split(size), layout=layout)
    for name in ("events", "heads", "layers"):
        same(getattr(whole, name), getattr(parts, name))
    assert parts.meta["samples"] == 7
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    mixed = sw.scan(model, x[order].split(size), layout=layout)
    same(whole.heads, mixed.heads)
    same(whole.layers, mixed.layers)
    renamed = mixed.events.with_columns(
        pl.col("sample").replace_strict(dict(enumerate(order.tolist())))
    )
    same(whole.events, renamed.sort("sample", "layer", "name", "head", "token"))


def language_model(name):
    torch.manual_seed(0)
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=97, n_embd=24, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            vocab_size=97, hidden_size=24, num_hidden_layers=2, intermediate_size=29,
            num_attention_heads=4, num_key_value_heads=2, attn_implementation=name,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data *= 6  # weights at random attend evenly
    return model


@pytest.mark.parametrize("name", ["sdpa", "eager", "gpt2"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_is_its_rows(name, side):
    model = language_model(name)
    lengths, width = (23, 17, 11, 23), 23
    random = torch.Generator().manual_seed(1)
    rows = [torch.randint(5, 97, (1, n), generator=random) for n in lengths]
    for row in rows[:3]:
        row[:, 0] = 1
    batch = []
    for row in rows:
        gone = (width - row.shape[1], 0) if side == "left" else (0, width - row.shape[1])
        ids = nn.functional.pad(row, gone, value=4)
        mask = nn.functional.pad(torch.ones_like(row), gone)
        batch.append((ids, mask, (mask.cumsum(1) - 1).clamp(min=0)))
    names = ("input_ids", "attention_mask", "position_ids")
    joined = {n: torch.cat(part) for n, part in zip(names, zip(*batch, strict=True), strict=True)}
    together = sw.scan(model, [joined], rules=ALL)
    alone = [sw.scan(model, [{"input_ids": row}], rules=ALL) for row in rows]
    events = [s.events.with_columns(pl.col("sample") + i) for i, s in enumerate(alone)]
    same(together.events, pl.concat(events), 2e-5)
    assert len(together.events) == 2 * 4 * sum(lengths)
    # Heads: medians over all events, of which every sample has as many as tokens.
    median = pl.concat(events).group_by("layer", "head").agg(pl.col("value_ratio").median())
    same(
        together.heads.select("layer", "head", "value_ratio"),
        median.sort("layer", "head"),
        2e-5,
    )
    assert set(together.heads["samples"]) == {4} and set(together.heads["sink_share"]) == {1.0}
    assert together.meta["samples"] == 4
    for column in together.layers.columns:
        parts = [s.layers[column].to_numpy() for s in alone if column in s.layers.columns]
        if column.startswith(MEANS):
            present = [np.zeros(2)] * (4 - len(parts)) + parts  # no BOS in the last: it gets 0
            right = np.mean(present, axis=0)
            np.testing.assert_allclose(together.layers[column], right, rtol=2e-5, atol=2e-5)
        if column in ("token_norm_max", "largest_activation"):
            np.testing.assert_allclose(together.layers[column], np.max(parts, axis=0), rtol=2e-5)
            best = np.argmax(parts, axis=0)
            for place in {"token_norm_max": ["token_norm_max_token"]}.get(
                column, ["largest_token", "largest_dim"]
            ):
                right = [alone[best[layer]].layers[place][layer] for layer in range(2)]
                assert together.layers[place].to_list() == right
    assert "received_pad" not in together.layers.columns
    # The first token of every row counts once, as a BOS or not.
    assert together.events.filter(pl.col("token") == 0)["kind"].unique().sort().to_list() == [
        "bos",
        "first",
    ]
    kinds_ = {"received_first", "received_text"} | (
        {"received_special"} & set(together.layers.columns)
    )
    total = together.layers.select(pl.sum_horizontal(kinds_)).to_series()
    assert total.to_list() == pytest.approx([1.0, 1.0], abs=1e-5)


HEADS = [
    "layer", "name", "head", "samples", "sink_share", "kind", "token", "received", "value_ratio",
    "value_ratio_raw", "stable_rank", "spike", "spike_random", "nop_share", "broadcast_share",
    "verdict", "nonfinite",
]  # fmt: skip


def test_the_frames_columns(tmp_path):
    x = tokens(3, 67, {0: [0]}, empty=[0])
    found = sw.scan(Planted([[0, None]]), [x], layout=kinds("bos", "register", rest="text"))
    named = (
        "sample layer name head token kind received routed_share min_attention value_ratio "
        "value_ratio_raw stable_rank rank_one_energy update_norm token_norm_ratio mechanism"
    )
    assert set(named.split()) <= set(found.events.columns)
    assert found.events.columns == list(EVENT_SCHEMA)
    assert found.heads.columns == HEADS
    assert found.layers.columns == [
        "layer", "name", "samples", "received_register", "received_bos", "received_text",
        "received_first", "token_norm_max", "token_norm_max_token", "token_norm_median",
        "token_norm_median_before", "token_norm_first", "similarity_before", "similarity_after",
        "largest_activation", "largest_token", "largest_dim", "massive_share", "normed",
        "nonfinite",
    ]  # fmt: skip
    kept = sw.Scan.load(found.save(tmp_path / "scan"))
    for name in ("events", "heads", "layers"):
        assert getattr(kept, name).equals(getattr(found, name))
        assert getattr(kept, name).schema == getattr(found, name).schema
    assert kept.meta == found.meta
    assert kept.verdict().evidence == found.verdict().evidence
    empty = sw.scan(Planted([[None]]), [x])
    assert empty.events.schema == pl.Schema(EVENT_SCHEMA) and len(empty.events) == 0
    assert sw.Scan.load(empty.save(tmp_path / "empty")).events.schema == empty.events.schema


def statistics(batch, heads, events, broken=(), keys=5):
    """Hand-made statistics of a call: `events` and `broken` are (row, head)."""
    finite = torch.ones(batch, heads, dtype=torch.bool)
    for place in broken:
        finite[place] = False
    row, head = torch.tensor(events, dtype=torch.int64).reshape(-1, 2).T
    values = {name: torch.full((len(row),), 0.1) for name in EVENT_FIELDS}
    return CallStatistics(
        codes=TokenLayout.uniform("patch", batch, keys).codes,
        by_kind=torch.eye(len(KINDS))[2]
        .expand(batch, heads, -1)
        .masked_fill(~finite[..., None], torch.nan),
        first=torch.full((batch, heads), 0.25).masked_fill(~finite, torch.nan),
        finite=finite,
        sinks=Keys(row, head, torch.zeros_like(row)),
        fields=values,
    )


def call(part, stats, windows=1, name="attn"):
    part.add_call(0, name, stats, windows)
    part.samples = stats.finite.shape[0] // windows
    return part


def after(samples, part):
    """The sums after `samples` earlier samples."""
    total = SampleSums(samples=samples)
    total.append(part)
    return total


def test_windows_of_a_sample():
    """Four windows for each of three samples: a sample counts once, with its own index."""
    part = call(SampleSums(), statistics(12, 2, [(0, 0), (1, 0), (5, 0), (11, 1)]), windows=4)
    tables = Tables(after(7, part), sw.Rules())
    events = tables.events()
    assert events.select("sample", "head").rows() == [(7, 0), (7, 0), (8, 0), (9, 1)]
    heads = tables.heads(events)
    assert heads["samples"].to_list() == [3, 3]
    assert heads["sink_share"].to_list() == pytest.approx([2 / 3, 1 / 3])


def test_a_sample_with_a_broken_window_is_left_out_whole():
    stats = statistics(6, 2, [(0, 0), (2, 0), (2, 1)], broken=[(1, 0)])
    stats.first[0] = 1.0
    tables = Tables(call(SampleSums(), stats, windows=2), sw.Rules())
    events = tables.events()
    assert events.select("sample", "head").rows() == [(1, 0), (1, 1)]
    heads = tables.heads(events)
    assert heads["nonfinite"].to_list() == [1, 0] and heads["samples"].to_list() == [3, 3]
    assert heads["sink_share"].to_list() == pytest.approx([1 / 2, 1 / 3])
    layers = tables.layers().row(0, named=True)
    assert layers["nonfinite"] == 1
    assert layers["received_first"] == pytest.approx((9 * 0.25 + 1.0) / 10)


def test_a_module_that_is_called_twice():
    """Two calls on the same samples: samples count once, events of both calls are kept."""
    total = SampleSums()
    for _ in range(2):
        part = call(SampleSums(), statistics(3, 2, [(0, 0), (1, 0)]))
        total.append(call(part, statistics(3, 2, [(0, 0), (2, 0)], broken=[(1, 0), (2, 1)])))
    tables = Tables(total, sw.Rules())
    events = tables.events()
    heads = tables.heads(events)
    assert heads["samples"].to_list() == [6, 6]
    assert heads["nonfinite"].to_list() == [2, 2]
    assert events["sample"].to_list() == [0, 0, 2, 3, 3, 5]
    assert heads["sink_share"].to_list() == [1.0, 0.0]


class Twice(PlantedBlock):
    def forward(self, x):
        return x + self.attn(x) + self.attn(x)


def test_a_shared_attention_of_a_scan():
    model = Planted([[0, None], [1, None]])
    model.layers[0] = Twice(model.layers[0].attn)
    model.layers[1] = Twice(model.layers[1].attn)
    found = sw.scan(model, tokens(3, 41, {0: [0]}).split(2))
    assert set(found.heads["samples"]) == {3}
    assert found.heads["sink_share"].to_list() == [1.0, 0.0, 0.0, 0.0]
    assert len(found.events) == 6


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.other_attn = PlantedAttention([0, None]), PlantedAttention([None, 1])

    def forward(self, x):
        return x + self.self_attn(x) + self.other_attn(x)


def test_two_attentions_in_one_block():
    model = Planted([[0]])
    model.layers = nn.ModuleList([Pair(), Pair()])
    found = sw.scan(model, [tokens(3, 41, {0: [0], 1: [4]})])
    rows = found.heads.select("layer", pl.col("name").str.slice(9), "head", "sink_share").rows()
    wanted = [("other_attn", 0, 0), ("other_attn", 1, 1), ("self_attn", 0, 1), ("self_attn", 1, 0)]
    assert rows == [(layer, *row) for layer in (0, 1) for row in wanted]
    assert found.layers.select("layer", "samples").rows() == [(0, 3), (0, 3), (1, 3), (1, 3)]


def test_swins_windows():
    torch.manual_seed(0)
    model = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=32, window_size=4, depths=(2, 2),
        num_heads=(2, 4), embed_dim=16, num_classes=0,
    )  # fmt: skip
    x = torch.randn(3, 3, 32, 32)
    found = sw.scan(model, x.split(2), rules=ALL)
    alone = [sw.scan(model, [x[i : i + 1]], rules=ALL).events for i in range(3)]
    alone = [frame.with_columns(pl.col("sample") + i) for i, frame in enumerate(alone)]
    order = ["sample", "layer", "head", "token", "received", "value_ratio"]
    same(found.events.sort(order), pl.concat(alone).sort(order), 1e-4)
    assert set(found.heads["samples"]) == {3} and set(found.heads["sink_share"]) == {1.0}
    assert found.heads.group_by("layer").len().sort("layer")["len"].to_list() == [2, 2, 4, 4]
    assert len(found.events) == 3 * (2 * 2 * 64 + 2 * 4 * 16)


def overflowing(dtype=torch.float32):
    """A model whose second head overflows on what the token's last scratch coordinate holds."""
    model = Planted([[0, 1, None]])
    model.layers[0].attn.v_proj.weight.data[7, -1] = 100.0
    x = tokens(4, 41, {0: [0], 1: [3]})
    x[2, 20, -1] = 0.6 * torch.finfo(dtype).max
    return model.to(dtype), x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_is_not_finite_is_counted_and_left_out(dtype, size):
    model, x = overflowing(dtype)
    found = sw.scan(model, x.split(size))
    clean = sw.scan(model, [x[[0, 1, 3]]])
    assert found.heads["nonfinite"].to_list() == [0, 1, 0] and found.meta["nonfinite"] == 1
    assert found.heads["samples"].to_list() == [4, 4, 4]
    assert found.heads["sink_share"].to_list() == [1.0, 1.0, 0.0]
    kept = found.events.filter(pl.col("sample") != 2).with_columns(pl.col("sample").replace({3: 2}))
    same(kept, clean.events, 1e-6 if size == 4 else 1e-5)
    assert found.events.filter(pl.col("sample") == 2)["head"].to_list() == [0]
    assert "1 of 12 attention maps" in " ".join(found.verdict().evidence)
    layers = found.layers.row(0, named=True)
    assert layers["nonfinite"] == 1
    for name, value in layers.items():
        assert not isinstance(value, float) or np.isfinite(value), name
    for name in ("token_norm_max", "largest_activation"):
        # The overflow itself is no extreme: 3.4e38 would be an invention.
        assert layers[name] == pytest.approx(clean.layers[name][0], rel=1e-3)


def test_a_model_that_is_all_nan():
    model = Planted([[0, 1]])
    model.layers[0].attn.v_proj.weight.data[0] = torch.nan
    model.layers[0].attn.q_proj.weight.data[0] = torch.nan
    found = sw.scan(model, [tokens(3, 41, {0: [0], 1: [3]})])
    assert found.heads["nonfinite"].to_list() == [3, 0]
    assert found.heads["sink_share"].to_list() == [None, 1.0]
    assert found.heads["verdict"].to_list() == ["none", "broadcast"]
    assert found.heads["spike"].is_nan().to_list() == [True, False]
    layers = found.layers.row(0, named=True)
    assert np.isnan(layers["token_norm_max"]) and np.isnan(layers["largest_activation"])
    assert layers["token_norm_max_token"] == layers["largest_dim"] == -1


def test_extremes_skip_padding_in_the_middle():
    part = call(SampleSums(), statistics(2, 1, []))
    x = torch.ones(2, 5, 3)
    real = torch.tensor([[True] * 5, [False, True, False, True, True]])
    x[1, 3, 2] = -7.0
    part.add_block(0, residual_statistics(x, real), residual_statistics(x, real), real, False)
    row = Tables(part, sw.Rules()).layers().row(0, named=True)
    assert (row["token_norm_max_token"], row["largest_token"], row["largest_dim"]) == (1, 1, 2)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_extremes_are_finite(bad):
    """Inf is not a largest norm, and neither is the largest float."""
    part = call(SampleSums(), statistics(2, 1, []))
    x = torch.ones(2, 5, 3)
    x[0, 2, 1], x[1, 3, 2] = bad, -7.0
    part.add_block(0, residual_statistics(x, None), residual_statistics(x, None), None, False)
    row = Tables(part, sw.Rules()).layers().row(0, named=True)
    assert row["token_norm_max"] == pytest.approx(51**0.5) and row["token_norm_max_token"] == 3
    assert row["largest_activation"] == 7.0
    assert (row["largest_token"], row["largest_dim"]) == (3, 2)


@pytest.mark.parametrize("targets", [[None, None], [0, 1]])
def test_memory_does_not_grow(targets):
    """As many tensors live after twelve batches as after three; rows are numpy arrays."""
    model = Planted([targets] * 2)
    counts, refs, alive = [], [], []

    def batches():
        for seed in range(12):
            batch = tokens(2, 41, {0: [0], 1: [2]}, seed=seed)
            refs.append(weakref.ref(batch))
            yield batch
            del batch

    def count(_):
        gc.collect()
        counts.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))
        alive.append(sum(ref() is not None for ref in refs))

    found = sw.scan(model, batches(), progress=count)
    rows = 0 if targets == [None, None] else 4  # two layers, two heads
    assert counts[-1] == counts[2]
    assert max(alive) <= 3 and alive[-1] == alive[2]
    assert len(found.events) == rows * 24
