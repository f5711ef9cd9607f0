"""The arguments and outputs of a decoder's call: tokens, padding, the parts of a split call."""

from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from sinkwise.errors import InputError

CACHES = ("past_key_values", "cache")
"""The cache's argument in transformers 4 and in late 5."""
TOKENS = ("input_ids", "inputs_embeds", "token_type_ids")
"""Arguments with one column per token."""


def tokens_of(kwargs: dict[str, Any]) -> Tensor:
    """The first argument with one column per token. Raises InputError if there is none."""
    given = [kwargs[name] for name in TOKENS if kwargs.get(name) is not None]
    if not given:
        raise InputError("a call with a SinkCache needs input_ids or inputs_embeds; got neither")
    return given[0]


def check(kwargs: dict[str, Any], base: nn.Module) -> None:
    """Raise InputError for a call that a sink cache cannot serve correctly."""
    if kwargs.get("use_cache") is False:
        raise InputError(
            "use_cache=False in a call with a SinkCache (some configurations say so): give "
            "use_cache=True as well"
        )
    if base.training and torch.is_grad_enabled():
        raise InputError(
            "a SinkCache has no gradients: call model.eval() or use torch.no_grad(); for training "
            "use sinkwise.sink_mask"
        )


def real(mask: Any, batch: int, length: int, seen: int) -> Bool[Tensor, "batch query"] | None:
    """Which of the new tokens are real; None if all are. `seen`: columns of earlier calls.

    Raises InputError for a mask that is no padding mask of these tokens.
    """
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2 or len(mask) != batch:
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(
            f"attention_mask is {shape}: a sink cache makes its own masks and only needs the "
            f"padding; give a tensor of {batch} rows of 1 (real) and 0 (padding)"
        )
    if mask.shape[1] not in (length, seen + length):
        raise InputError(
            f"attention_mask has {mask.shape[1]} columns; it must have {length} (the new tokens) "
            f"or {seen + length} (all tokens so far and the new ones)"
        )
    new = mask[:, -length:].to("cpu").bool()
    return None if bool(new.all()) else new


def part(kwargs: dict[str, Any], start: int, size: int, length: int) -> dict[str, Any]:
    """The arguments for `size` of a call's `length` tokens, from `start` on."""
    if size == length:
        return dict(kwargs)
    if kwargs.get("output_attentions"):
        raise InputError(
            f"output_attentions with {length} tokens, which must be split into shorter calls; "
            f"give at most {size} tokens at a time"
        )
    out = dict(kwargs)
    for name in TOKENS:
        if isinstance(out.get(name), Tensor):
            out[name] = out[name][:, start : start + size]
    return out


def joined(outputs: list[Any]) -> Any:
    """One output made of those of consecutive calls."""
    last = outputs[-1]
    if isinstance(last, tuple):
        return (torch.cat([output[0] for output in outputs], dim=1), *last[1:])
    last["last_hidden_state"] = torch.cat(
        [output["last_hidden_state"] for output in outputs], dim=1
    )
    if last.get("hidden_states") is not None:
        layers = zip(*(output["hidden_states"] for output in outputs), strict=True)
        last["hidden_states"] = tuple(torch.cat(parts, dim=1) for parts in layers)
    return last
