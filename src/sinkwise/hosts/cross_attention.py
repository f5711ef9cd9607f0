"""What a module's path says about its sequences: cross attention, and the decoder of two towers."""

import re

_CROSS = re.compile(
    r"cross|enc(oder)?_?(attn|attention|dec)|multihead_attn|\bx_attn|token_to_image|image_to_token",
    re.IGNORECASE,
)
"""Names for attention whose queries and keys are different sequences."""
_DECODER = re.compile(r"(^|\.)decoder(\.|$)")
_INDEX = re.compile(r"(^|.*\.)\d+\.")
"""A path up to the last position in a list of layers."""


def is_cross(path: str) -> bool:
    """Whether the module at `path` attends from one sequence to another.

    Only names inside the block count: `layer.0.crossattention.self` of a BERT decoder does, and
    `cross_modal_text_layers.0.attention.self` does not.
    """
    return bool(_CROSS.search(_INDEX.sub("", path, count=1)))


def is_decoder(path: str) -> bool:
    """Whether the module at `path` belongs to the decoder of an encoder-decoder model."""
    return bool(_DECODER.search(path))
