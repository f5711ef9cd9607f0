"""Signatures against a plain form and against closed forms."""

import pytest
import torch

from sinkwise.synthetic.broadcast import Broadcast
from sinkwise.synthetic.model import AttentionOnly
from sinkwise.synthetic.paper_tasks import PreNormBroadcast, SweepDamping
from sinkwise.synthetic.signature import signatures, similarity
from tests.synthetic import signature


def test_equal_the_plain_form():
    task = Broadcast(dim=7, length=5, gate="elementwise")
    model = task.model(torch.Generator().manual_seed(0))
    inputs, _, source = task.sample(torch.Generator().manual_seed(1), 11)
    states = [inputs, *[state.detach() for state in model.states(inputs)]]
    for layer, found in enumerate(signatures(model, inputs, source)):
        attention = model.layers[layer].attention
        plain = signature(attention, states[layer], source)
        torch.testing.assert_close(found.attention, plain.attention, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(found.mass, plain.mass, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(found.value_ratio, plain.ratio, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(found.stable_rank, plain.stable_rank, atol=1e-4, rtol=1e-4)
        added = (states[layer + 1] - states[layer]).double()
        torch.testing.assert_close(found.update, added, atol=1e-5, rtol=1e-4)
        theta = attention.q_proj.weight.T.double() @ attention.k_proj.weight.double()
        torch.testing.assert_close(found.spectrum, torch.linalg.svdvals(theta).detach())
        gate = torch.sigmoid(attention.gate.proj(states[layer])).mean(-1).double()
        torch.testing.assert_close(found.gate, gate.detach(), atol=1e-6, rtol=1e-5)
        for side, state in zip(found.similarity, states[layer : layer + 2], strict=True):
            assert side == pytest.approx(pairwise(state), abs=1e-6)


def pairwise(state):
    cosines = [
        torch.cosine_similarity(x[i], x[j], dim=0)
        for x in state
        for i in range(len(x))
        for j in range(len(x))
        if i != j
    ]
    return float(torch.stack(cosines).mean())


def test_similarity_of_equal_and_of_opposite_tokens():
    assert similarity(torch.ones(2, 5, 3)) == pytest.approx(1.0)
    assert similarity(torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]])) == pytest.approx(-1.0)


def test_column_share_counts_samples_whose_most_attended_token_is_the_sink():
    model = AttentionOnly(6, generator=torch.Generator().manual_seed(0))
    model.layers[0].attention.q_proj.weight.data.zero_()
    inputs = torch.randn(7, 5, 6)
    uniform = signatures(model, inputs, torch.zeros(7, dtype=torch.int64))[0]
    assert uniform.column_share == 1.0, "all tokens receive the same"
    torch.testing.assert_close(uniform.mass, torch.full((7, 5), 0.2, dtype=torch.float64))
    model = AttentionOnly(6, generator=torch.Generator().manual_seed(0))
    found = [
        signatures(model, inputs, torch.full((7,), position))[0].column_share
        for position in range(5)
    ]
    assert sum(found) == pytest.approx(1.0)


def test_registers_and_local_attention():
    model = AttentionOnly(
        6, num_layers=2, num_registers=1, local=True, generator=torch.Generator().manual_seed(0)
    )
    found = signatures(model, torch.randn(2, 5, 6), torch.zeros(2, dtype=torch.int64))
    assert [one.attention.shape for one in found] == [(2, 6, 6)] * 2
    seen = found[0].attention[0] > 0
    assert seen[0].all() and seen[:, 0].all() and int(seen.sum()) == 16


@pytest.mark.parametrize("task", [SweepDamping(dim=6, length=3), PreNormBroadcast(dim=6, length=4)])
def test_the_authors_models(task):
    model = task.model(torch.Generator().manual_seed(0))
    sample = task.sample(torch.Generator().manual_seed(1), 2)
    found = signatures(model, sample.inputs, torch.zeros(2, dtype=torch.int64))
    assert len(found) == getattr(task, "num_layers", 1)
    for one in found:
        assert one.attention.shape == (2, 4, 4)
        torch.testing.assert_close(one.attention.sum(-1), torch.ones(2, 4, dtype=torch.float64))
    hooks = [module for module in model.modules() if module._forward_hooks]
    assert not hooks


@pytest.mark.parametrize("softmax", ["learnable", "off-by-one"])
def test_the_share_of_a_sink_logit(softmax):
    task = Broadcast(dim=7, length=5, softmax=softmax)
    model = task.model(torch.Generator().manual_seed(0))
    for layer in model.layers:
        if softmax == "learnable":
            layer.attention.sink.logit.data.fill_(1.3)
    inputs, _, source = task.sample(torch.Generator().manual_seed(1), 11)
    states = [inputs, *[state.detach() for state in model.states(inputs)]]
    for layer, found in enumerate(signatures(model, inputs, source)):
        attention = model.layers[layer].attention
        q, k = (proj(states[layer]).double() for proj in (attention.q_proj, attention.k_proj))
        powers = (q @ k.mT / 7**0.5).exp()
        logit = torch.tensor(1.3 if softmax == "learnable" else 0.0)
        total = powers.sum(-1, keepdim=True) + logit.double().exp()
        torch.testing.assert_close(found.attention, powers / total, atol=1e-6, rtol=1e-5)
        share = (logit.double().exp() / total)[..., 0]
        torch.testing.assert_close(found.sink_logit_share, share, atol=1e-6, rtol=1e-5)
        added = (states[layer + 1] - states[layer]).double()
        torch.testing.assert_close(found.update, added, atol=1e-5, rtol=1e-4)
    plain = Broadcast(dim=7, length=5).model(torch.Generator().manual_seed(0))
    assert signatures(plain, inputs, source)[0].sink_logit_share.abs().max() < 1e-12
