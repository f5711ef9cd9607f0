"""Running a model on data: its batches, the tower that takes them, and the arguments."""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sinkwise.data.batch import LazyBatch, batch_checksum
from sinkwise.data.images import ImageInputs
from sinkwise.data.text import TextInputs
from sinkwise.errors import InputError
from sinkwise.hosts.loading.source import source_of

_POSITIONS = re.compile(r"(^|\.)(position_embeddings|embed_positions|wpe)$")


class Feed(NamedTuple):
    """The batches that a model runs on."""

    batches: Iterator[LazyBatch]
    """The batches in order, each loaded only when needed."""
    facts: Callable[[], dict[str, Any]]
    """A description of the data, as far as it is known without reading all of it."""


def feed(model: nn.Module, inputs: Any) -> Feed:
    """Batches of text or images prepared for this model; batches from any other iterable unchanged.

    Raises InputError for text if the model has no tokenizer or too few learned positions, for
    images if their preprocessing is unknown, and for a single tensor, dict or string.
    """
    source = source_of(model)
    if isinstance(inputs, TextInputs):
        if source is None or source.tokenizer is None:
            raise InputError(
                f"text needs the model's own tokenizer, and {type(model).__name__} has none; give "
                "a model loaded with sinkwise.load, or batches of token ids"
            )
        limit = position_limit(model)
        if limit is not None and inputs.length > limit:
            raise InputError(
                f"length={inputs.length} exceeds the {limit} positions that "
                f"{type(model).__name__} has learned; give at most length={limit}"
            )
        return Feed(inputs.lazy_batches(source.tokenizer), inputs.facts)
    if isinstance(inputs, ImageInputs):
        if source is None or source.image is None:
            raise InputError(
                f"images need the model's own preprocessing, and {type(model).__name__} has none; "
                "give a vision model loaded with sinkwise.load, or batches of pixel tensors"
            )
        return Feed(inputs.lazy_batches(source.image), partial(inputs.facts, source.image))
    if isinstance(inputs, Tensor | Mapping | str) or not isinstance(inputs, Iterable):
        raise InputError(
            f"batches is a {type(inputs).__name__}; it must be sinkwise.text(...), "
            "sinkwise.images(...) or a list of what the model takes (tensor, tuple or dict)"
        )
    return Feed(map(_in_memory, inputs), dict)


def _in_memory(batch: Any) -> LazyBatch:
    return LazyBatch(load=lambda: batch, first=lambda: batch, key=partial(batch_checksum, batch))


def position_limit(model: nn.Module) -> int | None:
    """Number of positions that a model has learned; None if it computes its positions."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and _POSITIONS.search(name):
            # RoBERTa and its descendants number positions from the padding index + 1.
            skipped = 0 if module.padding_idx is None else module.padding_idx + 1
            return module.num_embeddings - skipped
    return None


def tower(model: nn.Module, inputs: Any) -> nn.Module:
    """The part of a model that takes the inputs, e.g. the vision tower of CLIP for images."""
    if isinstance(inputs, ImageInputs) and getattr(model, "main_input_name", "") != "pixel_values":
        return getattr(model, "vision_model", model)
    if isinstance(inputs, TextInputs) and hasattr(model, "vision_model"):
        return getattr(model, "text_model", model)
    return model


def call(model: nn.Module, batch: Any) -> Any:
    """Run the model on a batch: a tensor, a tuple of its arguments, or a dict of named arguments.

    What attention does not need is switched off: no cache, and logits of one position only.
    """
    if isinstance(batch, Tensor):
        name = getattr(model, "main_input_name", None)
        batch = {name: batch} if isinstance(name, str) else (batch,)
    if isinstance(batch, tuple | list):
        return model(*batch)
    accepted = inspect.signature(model.forward).parameters
    savings = {"use_cache": False, "logits_to_keep": 1}
    return model(**{**{key: value for key, value in savings.items() if key in accepted}, **batch})


def moved(batch: Any, device: torch.device) -> Any:
    """The batch on the model's device."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, dict):
        return {key: moved(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(moved(value, device) for value in batch)
    return batch


def cast(batch: Any, dtype: torch.dtype) -> Any:
    """A batch of pixels in the model's dtype; any other batch unchanged."""
    if isinstance(batch, Tensor) and batch.is_floating_point():
        return batch.to(dtype)
    return batch


def first_sample(batch: Any, size: int) -> Any:
    """The batch cut to its first sample."""
    if isinstance(batch, Tensor):
        return batch[:1] if batch.dim() and batch.shape[0] == size else batch
    if isinstance(batch, dict):
        return {key: first_sample(value, size) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(first_sample(value, size) for value in batch)
    return batch


def batch_size(batch: Any) -> int:
    """The number of samples: the first size of the first tensor. Raises InputError without one."""
    values = batch.values() if isinstance(batch, Mapping) else batch
    if not isinstance(batch, Tensor | Mapping | tuple | list):
        values = ()
    for value in [batch] if isinstance(batch, Tensor) else values:
        if isinstance(value, Tensor) and value.dim():
            return value.shape[0]
    raise InputError(
        f"a batch holds no tensor, it is a {type(batch).__name__}; give a tensor, or a tuple or "
        "dict with tensors"
    )
