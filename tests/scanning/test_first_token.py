"""The kind of position 0: `first` if attention is causal and the token is not BOS."""

from dataclasses import replace

import polars as pl
import pytest
import torch
import transformers

import sinkwise as sw
from tests.planted import Planted, kinds, tokens

SIZES = {
    "vocab_size": 97, "hidden_size": 24, "num_hidden_layers": 2, "intermediate_size": 29,
    "num_attention_heads": 4,
}  # fmt: skip
BOS, LENGTH = 1, 19
EVERY_TOKEN = sw.MeanRule(min_queries=1, min_times_uniform=0.0, threshold=0.0)
RULES = replace(sw.Rules(), causal=EVERY_TOKEN, bidirectional=EVERY_TOKEN)


def llama(kernel="sdpa", **changes):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, attn_implementation=kernel, **changes)
    return transformers.LlamaForCausalLM(config)


def ids(rows=2, bos=()):
    found = torch.randint(5, 97, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
    found[list(bos), 0] = BOS
    return found


def kinds_of(scan):
    """{(sample, token): kind}, the same in all layers and heads."""
    rows = scan.events.select("sample", "token", "kind").unique().rows()
    named = {(sample, token): kind for sample, token, kind in rows}
    assert len(named) == len(rows)
    return named


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_a_causal_models_first_token(kernel):
    found = sw.scan(llama(kernel), [{"input_ids": ids(3, bos=[1])}], rules=RULES)
    named = kinds_of(found)
    assert [named[sample, 0] for sample in range(3)] == ["first", "bos", "first"]
    assert {kind for (_, token), kind in named.items() if token > 0} == {"text"}


def test_a_model_without_a_bos_token():
    model = llama(bos_token_id=None, eos_token_id=None)
    named = kinds_of(sw.scan(model, [ids(1, bos=[0])], rules=RULES))
    assert named[0, 0] == "first" and named[0, 1] == "text"


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_first_real_token_of_each_padded_row(side):
    given, mask = ids(3, bos=[2]), torch.ones(3, LENGTH, dtype=torch.int64)
    gone = slice(0, 7) if side == "left" else slice(12, None)
    mask[1:, gone] = 0
    if side == "left":
        given[2, 7] = BOS
    found = sw.scan(llama(), [{"input_ids": given, "attention_mask": mask}], rules=RULES)
    named = kinds_of(found)
    # Tokens are counted without padding.
    assert [named[sample, 0] for sample in range(3)] == ["first", "first", "bos"]
    assert max(token for sample, token in named if sample == 1) == 11
    assert sum(kind == "first" for kind in named.values()) == 2


def test_an_encoder_keeps_its_kinds():
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**SIZES))
    found = sw.scan(model, [{"input_ids": ids()}], rules=RULES)
    assert "first" not in set(found.events["kind"])


def test_a_decoders_first_token():
    """The layout does not describe a decoder's tokens; its causal mask shows the first one."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "d_model": 24, "d_kv": 6, "d_ff": 31, "num_heads": 4}
    model = transformers.T5Model(transformers.T5Config(**sizes, num_layers=1))
    batch = {"input_ids": ids(), "decoder_input_ids": ids()[:, :11]}
    events = sw.scan(model, [batch], rules=RULES).events
    first = events.filter(pl.col("kind") == "first").select("name", "token").unique().rows()
    assert first == [("decoder.block.0.layer.0.SelfAttention", 0)]


def test_the_users_own_kinds_stay():
    x = tokens(2, 41, {0: [0]})
    model = Planted([[0]])
    assert set(sw.scan(model, [x]).events["kind"]) == {"first"}
    named = sw.scan(model, [x], layout=kinds("special", rest="text"))
    assert set(named.events["kind"]) == {"special"}
    assert set(sw.scan(Planted([[0]], causal=False), [x]).events["kind"]) == {"other"}


def test_the_frames_and_the_verdict():
    """`received_first` has one meaning: the first token's attention, whatever its kind."""
    model, x = Planted([[0, None]]), tokens(3, 41, {0: [0]}, empty=[0])
    found = sw.scan(model, [x])
    received = [name for name in found.layers.columns if name.startswith("received_")]
    assert received == ["received_other", "received_first"]
    total = found.layers.select(pl.sum_horizontal(received)).item()
    assert total == pytest.approx(1.0, abs=1e-5)
    assert found.heads["kind"].to_list() == ["first", None]
    assert "mostly on the first token, " in found.verdict().evidence[1]
