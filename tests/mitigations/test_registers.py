"""Registers in existing models: seen by every block, by no output, and undone."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sinkwise as sw
from sinkwise.conformance import check_model
from sinkwise.conformance.traces import state_of
from sinkwise.core.layout import KINDS
from sinkwise.errors import InputError
from sinkwise.hosts.hidden import remembered
from sinkwise.hosts.layouts import token_layout
from sinkwise.mitigations.applying import mitigate, mitigated
from sinkwise.mitigations.gate import Gate
from sinkwise.mitigations.prepended_tokens import extended_mask
from sinkwise.mitigations.registers import Registers
from tests.models import build, pixels, run, tensors

FAMILIES = [
    "timm-vit-sdpa",
    "timm-vit-eager",
    "timm-vit-registers-sdpa",
    "timm-vit-gap-registers-sdpa",
    "timm-vit-pool-sdpa",
    "timm-deit-3-sdpa",
    "timm-deit-distilled-sdpa",
    "timm-eva-02-sdpa",
    "timm-eva-fused-sdpa",
    "timm-eva-grouped-sdpa",
    "timm-dinov3-eager",
    "vit-sdpa",
    "vit-eager",
    "deit-sdpa",
    "dinov2-sdpa",
    "dinov2-registers-sdpa",
    "dinov3-sdpa",
    "clip-vision-sdpa",
    "clip-vision-eager",
    "siglip-vision-sdpa",
    "bert-sdpa",
    "bert-eager",
    "roberta-sdpa",
    "electra-sdpa",
]
COUNT = 3


def outputs(model, inputs):
    with torch.no_grad():
        return tensors(run(model, inputs))


def same_bits(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("name", FAMILIES)
def test_shapes_stay_outputs_change_and_undo_leaves_no_trace(name):
    model, inputs = build(name)
    before, plain = state_of(model), outputs(model, inputs)
    handle = mitigate(model, Registers(COUNT))
    found = outputs(model, inputs)
    assert [out.shape for out in found] == [out.shape for out in plain]
    assert not same_bits(found, plain)
    handle.undo()
    assert state_of(model) == before
    assert same_bits(outputs(model, inputs), plain)


@pytest.mark.parametrize("name", FAMILIES)
def test_attention_sees_them_and_the_layout_names_them(name):
    model, inputs = build(name)
    plain = token_layout(model, inputs)
    lengths = set()
    mitigate(model, Registers(COUNT))
    with sw.capture(model, lambda record: lengths.add(tuple(record.k.shape[::2]))):
        outputs(model, inputs)
    layout = token_layout(model, inputs)
    assert (plain.batch, plain.length + COUNT) in lengths and layout.grid == plain.grid
    assert (layout.codes[:, :COUNT] == KINDS.index("register")).all()
    assert torch.equal(layout.codes[:, COUNT:], plain.codes)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_register_gets_a_gradient_of_its_own(name):
    model, inputs = build(name)
    mitigate(model, Registers(COUNT))
    answer = tensors(run(model, inputs))
    sum(out.float().square().sum() for out in answer).backward()
    grad = model.registers.tokens.grad
    assert (grad.abs().amax(1) > 0).all() and torch.pdist(grad).min() > 0


def reference(model, registers, x):
    """timm's ViT with the registers written out: after the class token, dropped at the norm."""
    x = model.norm_pre(model._pos_embed(model.patch_embed(x)))
    x = torch.cat([x[:, :1], registers.expand(len(x), -1, -1), x[:, 1:]], dim=1)
    for block in model.blocks:
        x = block(x)
    return model.norm(torch.cat([x[:, :1], x[:, 1 + len(registers) :]], dim=1))


def test_they_are_the_papers_registers():
    model, (x,) = build("timm-vit-sdpa")
    plain = copy.deepcopy(model)
    mitigate(model, Registers(COUNT, std=1.0))
    expected = reference(plain, model.registers.tokens, x)
    torch.testing.assert_close(model.forward_features(x), expected)
    torch.testing.assert_close(model(x), plain.forward_head(expected))


def test_intermediate_features_are_the_models_own_tokens():
    model, (x,) = build("timm-vit-sdpa")
    shapes = [part.shape for part in model.forward_intermediates(x, intermediates_only=True)]
    mitigate(model, Registers(COUNT, std=1.0))
    last, parts = model.forward_intermediates(x, norm=True)
    assert [part.shape for part in parts] == shapes
    torch.testing.assert_close(last, model.forward_features(x))
    torch.testing.assert_close(parts[-1].flatten(2).mT, last[:, 1:])


@pytest.mark.parametrize("asked_before", [False, True])
@pytest.mark.parametrize("name", ["vit-sdpa", "dinov2-sdpa", "clip-vision-sdpa", "bert-sdpa"])
def test_hidden_states_are_the_models_own_tokens(name, asked_before):
    """Also where transformers hooked its blocks before the registers came."""
    model, inputs = build(name)
    if asked_before:
        model(**inputs, output_hidden_states=True)
    mitigate(model, Registers(COUNT))
    out = model(**inputs, output_hidden_states=True)
    shapes = {state.shape for state in out.hidden_states}
    assert shapes == {out.last_hidden_state.shape} and len(out.hidden_states) == 3


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_padding_changes_nothing(kernel):
    """A padded sentence has the states that it has alone."""
    model, inputs = build(f"bert-{kernel}")
    mitigate(model, Registers(COUNT, std=1.0))
    with torch.no_grad():
        both = model(**inputs).last_hidden_state
        alone = model(input_ids=inputs["input_ids"][1:, :-3]).last_hidden_state
    torch.testing.assert_close(both[1:, :-3], alone)


def test_masks_of_every_form():
    allowed = torch.tensor([[True, True, False]])
    full = torch.tensor([[True, False, False], [True, True, False], [False, True, False]])
    assert extended_mask(allowed, 2, 3, "attention_mask").tolist() == [[True] * 4 + [False]]
    rows = extended_mask(full[None, None], 1, 3, "attention_mask")[0, 0]
    assert rows.tolist() == [[True, True, True, False], *([True, *r] for r in full.tolist())]
    added = torch.zeros(3, 3).masked_fill(~full, -torch.inf)
    rows = extended_mask(added, 1, 3, "attn_mask")
    assert (rows == 0).tolist() == [[True, True, True, False], *([True, *r] for r in full.tolist())]
    key = extended_mask(added[None, None, :1], 1, 3, "attention_mask")
    assert key.shape == (1, 1, 1, 4) and (key[..., 0] == 0).all()
    assert extended_mask(torch.tensor([[1, 0, 0]] * 3), 1, 3, "attention_mask").shape == (3, 4)
    for odd in (torch.ones(1, 2), "mask"):
        with pytest.raises(InputError, match="whose last size is the number of tokens, 3"):
            extended_mask(odd, 1, 3, "attn_mask")


def test_a_mask_of_timms_is_taken_along():
    model, (x,) = build("timm-vit-sdpa")
    mitigate(model, Registers(COUNT))
    open_ = torch.ones(16, 16, dtype=torch.bool)
    torch.testing.assert_close(model(x, attn_mask=open_), model(x))
    with pytest.raises(InputError, match="is_causal=True"):
        model(x, is_causal=True)


@pytest.mark.parametrize("name", ["timm-vit-sdpa", "vit-sdpa"])
def test_checkpointing_computes_the_same_gradients(name):
    found = []
    for checkpointed in (False, True):
        model, inputs = build(name)
        mitigate(model, Registers(COUNT), Gate())
        model.train()
        if checkpointed and name == "vit-sdpa":
            model.activation_checkpointing_enable()
        elif checkpointed:
            model.set_grad_checkpointing()
        tensors(run(model, inputs))[0].square().sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, grad in found[0].items():
        torch.testing.assert_close(grad, found[1][name])


def test_reentrant_checkpointing_is_refused():
    """It hands on copies, and no gradient would reach the registers."""
    model, _ = build("timm-vit-sdpa")
    mitigate(model, Registers(COUNT))
    x = torch.randn(2, 16, 40, requires_grad=True) * 1
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=True)
    with pytest.raises(InputError, match=r"'blocks.1' was given other.*use_reentrant=False"):
        x.sum().backward()


def test_lost_registers_are_an_error_not_a_shorter_sequence():
    model, (x,) = build("timm-vit-sdpa")
    mitigate(model, Registers(COUNT))
    handle = model.blocks[0].register_forward_hook(lambda module, args, out: out.clone())
    with pytest.raises(InputError, match=r"'blocks.1' was given other tokens"):
        model(x)
    handle.remove()
    model(x)


def test_nothing_is_kept_alive():
    model, _ = build("timm-vit-sdpa")
    mitigate(model, Registers(COUNT))
    stream = torch.randn(2, 16, 40, requires_grad=True)  # a leaf is in its own graph
    out = model.blocks(stream)
    kept = [weakref.ref(tensor) for tensor in (stream, out, remembered(out))]
    del stream, out
    gc.collect()
    assert [ref() for ref in kept] == [None] * 3


def test_a_copy_has_registers_and_a_handle_of_its_own():
    model, inputs = build("vit-sdpa")
    plain = outputs(model, inputs)
    mitigate(model, Gate(), Registers(COUNT))
    with_registers = outputs(model, inputs)
    other = copy.deepcopy(model)
    nn.init.constant_(other.registers.tokens, 1.0)
    assert not same_bits(outputs(other, inputs), with_registers)
    assert same_bits(outputs(model, inputs), with_registers)
    mitigated(other).undo()
    assert same_bits(outputs(other, inputs), plain)
    assert same_bits(outputs(model, inputs), with_registers)


@pytest.mark.parametrize("name", ["timm-vit-sdpa", "dinov2-registers-sdpa", "bert-eager"])
def test_a_mitigated_model_conforms(name):
    model, inputs = build(name)
    mitigate(model, Gate("headwise", init="paper"), Registers(COUNT))
    failed = [result for result in check_model(model, inputs) if result.status == "failed"]
    assert not failed


@pytest.mark.parametrize("name", ["dinov2-sdpa", "clip-vision-sdpa", "bert-sdpa"])
def test_saved_and_loaded(tmp_path, name):
    model, inputs = build(name)
    mitigate(model, Gate(), Registers(COUNT, std=0.5), seed=7)
    mitigated(model).save(tmp_path / "model")
    other = sw.load(tmp_path / "model")
    assert same_bits(outputs(model, inputs), outputs(other, inputs))
    assert mitigated(other).mitigations == (Gate(), Registers(COUNT, std=0.5))


def test_a_scan_counts_them_as_registers():
    """A register with a large norm draws attention, and the scan finds it in every head."""
    model, inputs = build("timm-vit-sdpa")
    mitigate(model, Registers(2))
    with torch.no_grad():
        for block in model.blocks:
            qkv = block.attn.qkv
            qkv.weight[:80] = 0
            qkv.bias[:40] = 10.0  # every query asks for a low last channel
            qkv.bias[40:80] = 0
            qkv.weight[40:80:8, 39] = -1
            nn.init.ones_(block.norm1.weight)
            nn.init.zeros_(block.norm1.bias)
        model.registers.tokens[1] = torch.tensor([30.0] * 39 + [-1000.0])
    scan = sw.scan(model, [inputs])
    first = scan.events.filter(scan.events["layer"] == 0)
    assert len(first) > 0
    assert set(first["token"]) == {1} and set(first["kind"]) == {"register"}
    assert (first["token_norm_ratio"] > 10).all()
    # The residual stream is measured on the tokens that the block sees.
    loudest = model.registers.tokens.norm(dim=-1).max().item()
    assert scan.layers["token_norm_max"][0] == pytest.approx(loudest, rel=0.05)


def test_a_scan_of_padded_sentences():
    model, inputs = build("bert-sdpa")
    mitigate(model, Registers(COUNT))
    layers = sw.scan(model, [inputs]).layers
    assert (layers["received_register"] > 0).all()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt2-sdpa", "'transformer.h.0' is a GPT2Block.*sink is usually the first token"),
        ("llama-sdpa", "is a LlamaDecoderLayer.*in a causal model"),
        ("clip-sdpa", "several lists of blocks; give one part"),
        ("timm-swin-sdpa", "several lists"),
        ("timm-beit-sdpa", "'blocks.0' is a Block.*prepended tokens do not shift"),
        ("beit-sdpa", "is a BeitLayer"),
    ],
)
def test_what_takes_no_registers_is_named_and_left_alone(name, words):
    model, _ = build(name)
    before = state_of(model)
    with pytest.raises(InputError, match=words):
        mitigate(model, Gate(), Registers(COUNT))
    assert state_of(model) == before


def test_one_tower_of_two():
    """Registers in the vision tower are in the layout of images, not of the text."""
    model, inputs = build("clip-sdpa")
    text = {"input_ids": inputs["input_ids"]}
    before = token_layout(model, text).length
    mitigate(model.vision_model, Registers(COUNT))
    keys = set()
    with sw.capture(model, lambda record: keys.add(record.k.shape[2])):
        outputs(model, inputs)
    assert keys == {before, token_layout(model, {"pixel_values": inputs["pixel_values"]}).length}
    assert token_layout(model, text).length == before


def test_causal_towers_of_known_blocks_are_refused():
    import transformers

    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    sizes |= {"intermediate_size": 20, "vocab_size": 31}
    text = transformers.CLIPTextModel(transformers.CLIPTextConfig(**sizes))
    decoder = transformers.BertModel(transformers.BertConfig(**sizes, is_decoder=True))
    for model in (text, decoder):
        with pytest.raises(InputError, match="is causal, and in a causal model"):
            mitigate(model, Registers())


def open_clip_tower(**options):
    transformer = pytest.importorskip("open_clip.transformer")
    torch.manual_seed(0)
    return transformer.VisionTransformer(
        image_size=24, patch_size=8, width=40, layers=2, heads=5, mlp_ratio=2.0, output_dim=7,
        **options,
    ).eval()  # fmt: skip


def test_open_clips_vision_tower():
    model, x = open_clip_tower(), pixels((24, 24))
    before, plain = state_of(model), model(x)
    handle = mitigate(model, Registers(COUNT))
    assert model(x).shape == plain.shape and not torch.equal(model(x), plain)
    assert token_layout(model, x).codes[0].tolist() == [1, 1, 1, 0, *[2] * 9]
    handle.undo()
    assert state_of(model) == before and torch.equal(model(x), plain)


def test_open_clips_text_tower_is_causal():
    transformer = pytest.importorskip("open_clip.transformer")
    model = transformer.TextTransformer(
        context_length=7, vocab_size=31, width=24, heads=3, layers=2, output_dim=5
    )
    with pytest.raises(InputError, match="its attention is causal"):
        mitigate(model, Registers())


def test_tokens_first_is_refused():
    model = open_clip_tower()
    for block in model.transformer.resblocks:
        block.attn.batch_first = False
    with pytest.raises(InputError, match="build it with batch_first=True"):
        mitigate(model, Registers())


@pytest.mark.parametrize(
    ("options", "words"), [({"count": 0}, "count=0 must be"), ({"std": 0.0}, "std=0.0 must be")]
)
def test_unusable_settings_are_named(options, words):
    with pytest.raises(InputError, match=words):
        Registers(**options)


def test_a_name_that_is_taken_is_left_alone():
    model, _ = build("timm-vit-sdpa")
    model.registers = nn.Identity()
    with pytest.raises(InputError, match="has 'registers' already"):
        mitigate(model, Registers())
