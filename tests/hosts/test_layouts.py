"""Token layouts: each position is what the model itself puts there."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sinkwise.core.layout import KINDS
from sinkwise.hosts.blocks import find_blocks
from sinkwise.hosts.layouts import token_layout
from tests.models import CASES, Case, build, run, tensors

IMAGE_CASES = [case for case in CASES if case.prefix is not None]
images = pytest.mark.parametrize("case", IMAGE_CASES, ids=lambda case: case.name)

CLASS = ("cls_token", "class_embedding", "dist_token", "distillation_token")
REGISTER = ("reg_token", "register_tokens", "storage_tokens")


def first_input(model: nn.Module, inputs: Any) -> Tensor:
    """What enters the first block."""
    seen: list[Tensor] = []

    def enter(module: nn.Module, args: tuple, kwargs: dict) -> None:
        seen.append(tensors([*args, *kwargs.values()])[0])

    hook = find_blocks(model)[0].module.register_forward_pre_hook(enter, with_kwargs=True)
    with torch.no_grad():
        run(model, inputs)
    hook.remove()
    return seen[0]


def moved(before: Tensor, after: Tensor) -> list[int]:
    """Positions that changed."""
    return (before - after).abs().amax(dim=(0, 2)).nonzero().flatten().tolist()


def kinds(codes: Tensor) -> list[str]:
    """The names of one sample's codes."""
    return [KINDS[code] for code in codes.tolist()]


def pixels_of(inputs: Any) -> Tensor:
    return inputs["pixel_values"] if isinstance(inputs, dict) else inputs[0]


@images
def test_positions_are_where_the_parameters_act(case: Case) -> None:
    model, inputs = case.build()
    layout = token_layout(model, inputs)
    assert layout is not None and layout.grid is not None
    before = first_input(model, inputs)
    rows, cols = layout.grid
    assert (layout.batch, layout.length) == before.shape[:2]
    assert kinds(layout.codes[0]) == [*case.prefix, *["patch"] * (rows * cols)]
    for names, kind in ((CLASS, "cls"), (REGISTER, "register")):
        acted: list[int] = []
        for name, parameter in model.named_parameters():
            if name.rpartition(".")[2] in names:
                with torch.no_grad():
                    # Not a constant: a norm before the first block would take it away.
                    parameter.add_(torch.randn_like(parameter))
                after = first_input(model, inputs)
                acted += moved(before, after)
                before = after
        late = case.name.startswith(("timm-cait", "timm-xcit"))  # their class token joins later
        expected = [i for i, found in enumerate(kinds(layout.codes[0])) if found == kind]
        assert sorted(acted) == ([] if late else expected)


@images
def test_patches_are_in_the_order_of_the_grid(case: Case) -> None:
    model, inputs = case.build()
    layout = token_layout(model, inputs)
    assert layout is not None and layout.grid is not None
    rows, cols = layout.grid
    before = first_input(model, inputs).clone()
    height, width = (pixels_of(inputs).shape[2] // rows, pixels_of(inputs).shape[3] // cols)
    first = kinds(layout.codes[0]).index("patch")
    for row, col in ((0, 0), (0, 1), (1, 0), (rows - 1, cols - 1)):
        changed = pixels_of(inputs).clone()
        area = (..., slice(row * height, (row + 1) * height), slice(col * width, (col + 1) * width))
        changed[area] += torch.randn_like(changed[area])
        fed = {"pixel_values": changed} if isinstance(inputs, dict) else (changed,)
        after = first_input(model, fed)
        where = moved(before, after)
        if "xcit" in case.name:  # overlapping convolutions reach the neighbours too
            assert first + row * cols + col in where and len(where) <= 9
        else:
            assert where == [first + row * cols + col]


class Tokenizer:
    """What a layout reads of one."""

    all_special_ids = (0, 1, 2, 3)
    bos_token_id: int | None = 1
    cls_token_id: int | None = None


IDS = torch.tensor([[1, 5, 6, 2, 7, 8], [1, 9, 4, 2, 0, 0]])
RIGHT = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
LEFT_IDS = torch.tensor([[1, 5, 6, 2, 7, 8], [0, 0, 1, 9, 4, 2]])
LEFT = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])


def text(ids: Tensor, mask: Tensor | None, tokenizer: Any, model: str = "llama-sdpa") -> list:
    """Kinds of every sample."""
    batch = {"input_ids": ids} if mask is None else {"input_ids": ids, "attention_mask": mask}
    layout = token_layout(build(model)[0], batch, tokenizer)
    assert layout is not None and layout.grid is None
    return [" ".join(kinds(row)) for row in layout.codes]


def test_right_padding() -> None:
    assert text(IDS, RIGHT, Tokenizer()) == [
        "bos text text special text text",
        "bos text text special pad pad",
    ]


def test_left_padding() -> None:
    assert text(LEFT_IDS, LEFT, Tokenizer()) == [
        "bos text text special text text",
        "pad pad bos text text special",
    ]


def test_without_a_mask_nothing_is_padding() -> None:
    assert text(IDS, None, Tokenizer())[1] == "bos text text special special special"


def test_a_class_token_is_named_before_a_beginning_of_sequence() -> None:
    tokenizer = Tokenizer()
    tokenizer.cls_token_id, tokenizer.bos_token_id = 1, None
    assert text(IDS, RIGHT, tokenizer, "bert-sdpa")[0] == "cls text text special text text"
    tokenizer.bos_token_id = 1  # RoBERTa: both names for one token
    assert text(IDS, RIGHT, tokenizer, "bert-sdpa")[0].startswith("cls ")


def test_without_a_tokenizer_the_configuration_tells() -> None:
    assert text(IDS, RIGHT, None)[0] == "bos text text special text text"


def test_a_beginning_of_sequence_counts_only_at_the_start() -> None:
    again = torch.tensor([[1, 5, 1, 6, 1, 2]])
    assert text(again, None, Tokenizer()) == ["bos text special text special special"]


def test_text_without_a_beginning_has_none() -> None:
    assert text(torch.tensor([[5, 6, 7]]), None, Tokenizer()) == ["text text text"]


@pytest.mark.parametrize(
    "batch",
    [
        torch.randn(2, 13, 40),
        (torch.randn(2, 13, 40),),
        {"inputs_embeds": torch.randn(2, 13, 40)},
        {},
        [],
    ],
)
def test_neither_images_nor_ids_give_none(batch: Any) -> None:
    assert token_layout(build("llama-sdpa")[0], batch) is None


def test_a_bare_tensor_of_images_or_ids_is_understood() -> None:
    model, (pixels,) = build("timm-vit-sdpa")
    layout = token_layout(model, pixels)
    assert layout is not None and layout.length == 16
    layout = token_layout(build("llama-sdpa")[0], IDS)
    assert layout is not None and kinds(layout.codes[0])[0] == "bos"


def test_images_of_a_model_without_patches_give_none() -> None:
    assert token_layout(nn.Sequential(nn.Conv2d(3, 5, 3)), torch.randn(2, 3, 8, 8)) is None
