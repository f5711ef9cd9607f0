"""Cross attention by name: one answer for sites and scans, which agrees with measurement."""

import pytest
import torch
from torch import Tensor, nn

from sinkwise.capturing.capture import capture
from sinkwise.hosts.cross_attention import is_cross, is_decoder
from sinkwise.hosts.sites import attention_sites
from tests.models import CASES, Case, run

CROSS = {
    "decoder.block.0.layer.1.EncDecAttention": "T5, LongT5, mT5, UMT5, Switch, UDOP, Pop2Piano",
    "decoder.layer.0.encoder_decoder_attention.attention": "Pix2Struct",
    "decoder.layers.0.encoder_attn": "BART, Marian, Pegasus, Whisper, Moonshine, DETR, Informer",
    "decoder.layers.0.encoder_attn_text": "Grounding DINO",
    "decoder.layers.0.cross_attn": "ProphetNet, T5Gemma, Mask2Former",
    "decoder.layers.0.cross_attn.cross_attn": "DAB-DETR",
    "decoder.layers.0.cross_attention": "NLLB-MoE, Dia, SeamlessM4T",
    "decoder.bert.encoder.layer.0.crossattention.self": "BERT as a decoder",
    "encoder.layer.0.crossattention.self": "BERT, RoBERTa, ELECTRA with add_cross_attention",
    "text_model.encoder.layer.0.crossattention.self": "BLIP",
    "qformer.encoder.layer.0.crossattention.attention": "BLIP-2, InstructBLIP",
    "cross_modal_text_layers.0.crossattention.self": "BridgeTower",
    "h.0.crossattention": "GPT-2, ImageGPT with add_cross_attention",
    "language_model.layers.3.cross_attn": "Mllama",
    "gated_cross_attn_layers.0.cross_attn": "Idefics",
    "local_decoder.cross_attn_layers.0": "BLT",
    "encoder.cross_attention.attention.self": "Perceiver",
    "image_to_text_projection.x_attn": "Kosmos-2",
    "mask_decoder.transformer.layers.0.cross_attn_token_to_image": "SAM",
    "mask_decoder.transformer.final_attn_token_to_image": "SAM",
    "transformer_layers.0.cross_attention": "LightGlue",
    "layers.0.multihead_attn": "nn.TransformerDecoder",
    "multihead_attn": "nn.TransformerDecoderLayer",
}
SELF = {
    "decoder.block.0.layer.0.SelfAttention": "T5",
    "decoder.layers.0.self_attn": "BART",
    "encoder.layer.0.attention.self": "BERT",
    "encoder.layers.0.attention": "SpeechT5",
    "h.0.attn": "GPT-2",
    "cross_modal_text_layers.0.attention.self": "BridgeTower: in a block that has both",
    "transformer_layers.0.self_attention": "LightGlue",
    "mask_decoder.transformer.layers.0.self_attn": "SAM",
    "vision_model.head.attention": "SigLIP",
    "encoder.layers.0.self_attn": "nn.Transformer",
    "": "the model itself",
}


@pytest.mark.parametrize("path", CROSS)
def test_cross_attention_by_its_path(path: str) -> None:
    assert is_cross(path)


@pytest.mark.parametrize("path", SELF)
def test_self_attention_by_its_path(path: str) -> None:
    assert not is_cross(path)


TWO_SEQUENCES = [
    case
    for case in CASES
    if case.name.startswith(("t5", "bart", "whisper", "nn-decoder", "nn-transformer"))
]


@pytest.mark.filterwarnings("ignore:.*enable_nested_tensor:UserWarning")
@pytest.mark.parametrize("case", TWO_SEQUENCES, ids=lambda case: case.name)
def test_the_names_say_what_is_measured(case: Case) -> None:
    """In these models decoder and encoder sequences differ in length."""
    model, inputs = case.build()
    measured: dict[str, bool] = {}
    with (
        torch.no_grad(),
        capture(model, lambda one: measured.update({one.name: one.q.shape[2] != one.k.shape[2]})),
    ):
        run(model, inputs)
    assert set(measured.values()) == {True, False}
    assert {name: is_cross(name) for name in measured} == measured


class Attention(nn.Module):
    """BERT's form: the projections are in a submodule called `self`."""

    def __init__(self) -> None:
        super().__init__()
        self.self = nn.Module()
        self.self.num_attention_heads, self.self.attention_head_size = 3, 4
        self.self.query, self.self.key, self.self.value = (nn.Linear(12, 12) for _ in range(3))


class Block(nn.Module):
    """A pre-norm decoder block with one norm for each attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.crossattention = Attention(), Attention()
        self.layer_norm = nn.LayerNorm(12)

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_sites_give_cross_attention_no_gain_whatever_its_spelling() -> None:
    """`crossattention.self`: the last name alone does not say that it is cross attention."""
    sites = attention_sites(nn.Sequential(Block(), Block()))
    assert len(sites) == 4
    for path, site in sites.items():
        assert (site.input_gain is None) == is_cross(path) == ("crossattention" in path)


def test_the_decoder_of_two_towers() -> None:
    assert is_decoder("model.decoder.layers.0.self_attn") and is_decoder("decoder")
    assert not is_decoder("encoder.layers.0.self_attn") and not is_decoder("prompt_decoders.0")
