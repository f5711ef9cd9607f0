"""The shipped models show their mechanisms, and can be trained again."""

from dataclasses import replace
from inspect import unwrap

import pytest
import torch
from safetensors import safe_open

from sinkwise.errors import InputError
from sinkwise.synthetic.ship import WEIGHTS, main
from sinkwise.synthetic.shipped import TASKS, load_file, load_shipped
from tests.synthetic import assert_hub, assert_nop, relative_error, signature, values

FRESH = 77
"""Seed of inputs used neither in training nor in the demonstration."""


@pytest.fixture(scope="module")
def again(tmp_path_factory):
    """A folder in which the command has trained the models again."""
    folder = tmp_path_factory.mktemp("weights")
    threads = torch.get_num_threads()
    main(["--folder", str(folder)])
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()
    return folder


@pytest.fixture(params=["shipped", "again"])
def folder(request):
    """The package's files, then those of the new training."""
    return WEIGHTS if request.param == "shipped" else request.getfixturevalue("again")


def nop(folder, **changes):
    """Model, and fresh inputs, targets and aligned mask."""
    model, task, fixed = load_file(folder / "nop.safetensors")
    generator = torch.Generator().manual_seed(FRESH)
    return model, *replace(task, **changes).sample(generator, 128, fixed)


def nop_signature(model, inputs):
    return signature(model.layers[0].attention, inputs, torch.zeros(len(inputs), dtype=torch.int64))


def hub(folder):
    """Model, and fresh inputs, targets and source positions."""
    model, task, fixed = load_file(folder / "broadcast.safetensors")
    return model, *task.sample(torch.Generator().manual_seed(FRESH), 128, fixed)


@torch.no_grad()
def hub_signatures(model, inputs, source):
    states = [inputs, *model.states(inputs)]
    return [
        signature(layer.attention, x, source)
        for layer, x in zip(model.layers, states[:-1], strict=True)
    ]


@pytest.mark.parametrize("changes", [{}, {"length": 32, "aligned_share": 0.98}])
def test_nop(folder, changes):
    model, inputs, targets, aligned = nop(folder, **changes)
    assert_nop(nop_signature(model, inputs), aligned)
    with torch.no_grad():
        error = relative_error(model(inputs)[:, 1:], targets[:, 1:], inputs[:, 1:])
    assert error < (0.02 if changes else 1e-3)


def test_nop_fails_with_an_ordinary_value_at_the_sink():
    model, inputs, targets, aligned = nop(WEIGHTS)

    def edit(value):
        value[:, 0] = value[:, 1]

    with values(model.layers[0].attention, edit), torch.no_grad():
        found = nop_signature(model, inputs)
        error = relative_error(model(inputs)[:, 1:], targets[:, 1:], inputs[:, 1:])
    assert found.ratio.min() > 0.2 and error > 0.5
    with pytest.raises(AssertionError):
        assert_nop(found, aligned)


def test_nop_fails_without_attention_to_the_sink():
    model, inputs, _, aligned = nop(WEIGHTS)
    model.layers[0].attention.q_proj.weight.data.zero_()
    with pytest.raises(AssertionError):
        assert_nop(nop_signature(model, inputs), aligned)


def test_nop_needs_only_the_zero_value():
    model, inputs, targets, _ = nop(WEIGHTS)
    with values(model.layers[0].attention, lambda value: value[:, 0].zero_()), torch.no_grad():
        assert relative_error(model(inputs)[:, 1:], targets[:, 1:], inputs[:, 1:]) < 1e-3


def test_broadcast(folder):
    model, inputs, targets, source = hub(folder)
    first, second = hub_signatures(model, inputs, source)
    assert_hub(first, second)
    with torch.no_grad():
        assert relative_error(model(inputs), targets, inputs) < 1e-3
    # Layer 1 has nothing left to do: it is a NOP on the same token.
    assert second.mass.mean() > 0.9 and second.ratio.median() < 0.2


def test_broadcast_fails_with_the_payload_zeroed():
    model, inputs, targets, source = hub(WEIGHTS)
    rows = torch.arange(len(inputs))

    def edit(value):
        value[rows, source] = 0

    with values(model.layers[0].attention, edit), torch.no_grad():
        first, second = hub_signatures(model, inputs, source)
        error = relative_error(model(inputs), targets, inputs)
    assert first.ratio.max() == 0 and error > 0.5
    with pytest.raises(AssertionError):
        assert_hub(first, second)


def test_broadcast_sends_a_donors_payload():
    model, inputs, targets, source = hub(WEIGHTS)
    rows, donor = torch.arange(len(inputs)), torch.arange(len(inputs)).roll(1)

    def edit(value):
        value[rows, source] = value[donor, source[donor]]

    with values(model.layers[0].attention, edit), torch.no_grad():
        found = model(inputs) - inputs
    cosine = torch.cosine_similarity(found, (targets - inputs)[donor], dim=-1)
    assert cosine.mean() > 0.95


@pytest.mark.parametrize("name", ["nop", "nop-register", "broadcast", "broadcast-gate"])
def test_demonstration_inputs_are_sinks_by_the_event_rule(name):
    state = torch.get_rng_state()
    model, task, (inputs, _, _) = load_shipped(name)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(inputs, load_shipped(name)[2].inputs)
    assert not model.training and len(inputs) == 64
    assert inputs.shape[1] == task.length + task.num_unscored == 32 + task.num_unscored
    inputs = model.start(inputs).detach()
    rows = torch.arange(64)
    uniform = signature(model.layers[0].attention, inputs, torch.zeros_like(rows))
    found = signature(model.layers[0].attention, inputs, uniform.attention.mean(1).argmax(1))
    event = (found.mass >= 0.5).double().mean(1) >= 0.9
    assert event.double().mean() >= 0.95
    if name.startswith("nop"):
        assert found.ratio[event].max() <= 0.2
        assert ((found.mass < 0.5)[:, 1:]).any(), "some queries must not be NOP queries"
    else:
        assert found.ratio[event].min() >= 0.5 and found.stable_rank[event].max() <= 1.5


@pytest.mark.parametrize("name", TASKS)
def test_file_is_small_and_has_metadata(name):
    path = WEIGHTS / f"{name}.safetensors"
    assert path.stat().st_size < 64 * 1024
    with safe_open(path, "pt") as file:
        assert all(file.get_tensor(key).dtype == torch.float32 for key in file.keys())
        assert f'"name": "{name}"' in file.metadata()["sinkwise"]
        assert '"versions": {"python"' in file.metadata()["sinkwise"]


def test_fixed_vectors_in_the_files_are_those_of_the_seed():
    for name in TASKS:
        _, task, fixed = load_file(WEIGHTS / f"{name}.safetensors")
        assert fixed.keys() == task.fixed().keys()
        for key, tensor in task.fixed().items():
            torch.testing.assert_close(fixed[key], tensor, atol=1e-5, rtol=0)


def test_unknown_name():
    with pytest.raises(InputError, match=r"name='hub' must be one of nop, nop-gate"):
        unwrap(load_shipped)("hub")  # without the tests' type checker, which would refuse it first
