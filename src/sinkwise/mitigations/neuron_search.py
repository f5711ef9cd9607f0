"""`find_register_neurons`: which neurons cause the outlier norms of a model's patches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from sinkwise.core.layout import code
from sinkwise.errors import InputError
from sinkwise.hosts.inputs import call, cast, feed, moved
from sinkwise.hosts.layouts import token_layout
from sinkwise.mitigations.prepended_tokens import SUBMODULE, supported_blocks
from sinkwise.mitigations.register_neurons import (
    RegisterNeurons,
    down_projections,
    write_directions,
)

Outliers = Bool[Tensor, "image token"]
Callback = Callable[[int, Tensor], None]
"""(block, its output or its neurons' activations) → None."""


def find_register_neurons(
    model: nn.Module,
    inputs: Any,
    *,
    norm_ratio: float = 3.0,
    image_share: float = 0.1,
    neuron_share: float = 0.01,
    max_neurons: int = 50,
) -> RegisterNeurons:
    r"""The neurons that cause outlier norms on `inputs`, for `mitigate`; the model does not change.

    A patch is an outlier after a block if its norm is at least `norm_ratio` times the median of its
    image. Outliers appear at the first block whose outliers' ratios add up to half of the largest
    such sum. There, the share of neuron $n$ in the norm of an outlier $x$ is

    $$
    \frac{(a_n - \bar a_n)\, \langle w_n, e\rangle}{\lVert x\rVert},\qquad
    e = \frac{x}{\lVert x\rVert},
    $$

    averaged over all outliers, where $a_n$ is its activation, $\bar a_n$ the mean over the other
    patches, and $w_n$ what it adds to the residual stream for an activation of 1, in this block or
    an earlier one. Neurons with a share of at least `neuron_share` are taken, the largest first, at
    most `max_neurons`. (The paper ranks neurons by $|a_n|$ alone; the share also counts what a
    neuron writes, and in which direction.) The result's `evidence` says what was found.

    If fewer than `image_share` of the images have an outlier, as in most small models, or no neuron
    reaches `neuron_share`, the result has no neurons, says so, and changes nothing when applied.

    `inputs` are `sinkwise.images(...)` or a list of batches; they are loaded twice. Raises
    InputError for thresholds out of range, for inputs without patches, and for models that are in
    training mode, have registers inserted, or do not support them.

    Reference: Jiang et al., 2025, arXiv 2506.08010.
    """
    for name, value, least in (("norm_ratio", norm_ratio, 1), ("max_neurons", max_neurons, 1)):
        if value < least:
            raise InputError(f"{name}={value} must be at least {least}")
    for name, value in (("image_share", image_share), ("neuron_share", neuron_share)):
        if not 0 < value <= 1:
            raise InputError(f"{name}={value} must be above 0 and at most 1")
    down_projections(model)
    if model.training:
        raise InputError(f"{type(model).__name__} is in training mode; call model.eval() first")
    if hasattr(model, SUBMODULE):
        raise InputError(
            f"{type(model).__name__} has registers already; call undo() on mitigated(model) first"
        )
    search = _Search(model, norm_ratio)
    images, prefix = search.norms(inputs)
    weights = search.weights
    onset = next(block for block, weight in enumerate(weights) if 2 * weight >= max(weights))
    affected = sum(int(mask.any(-1).sum()) for mask in search.masks[onset])
    count = sum(int(mask.sum()) for mask in search.masks[onset])
    if affected < image_share * images or not affected:
        return RegisterNeurons(
            (),
            prefix,
            f"no outliers: {affected} of {images} images have a patch whose norm is at least "
            f"{norm_ratio:g} times the median; the largest is {search.largest:.1f} times",
        )
    shares = search.shares(inputs, onset)
    ranked = [
        (float(share[n]), block, int(n))
        for block, share in enumerate(shares)
        for n in torch.nonzero(share >= neuron_share)[:, 0]
    ]
    ranked = sorted(ranked, key=lambda one: (-one[0], *one[1:]))[:max_neurons]
    where = (
        f"{count} outlier patches in {affected} of {images} images after block {onset}, the "
        f"largest {search.largest:.1f} times the median"
    )
    if not ranked:
        return RegisterNeurons(
            (), prefix, f"{where}; no neuron causes {neuron_share:.0%} of their norm"
        )
    total = sum(share for share, _, _ in ranked)
    return RegisterNeurons(
        tuple((block, n) for _, block, n in ranked),
        prefix,
        f"{where}; {len(ranked)} neurons cause {total:.0%} of their norm, the first "
        f"{ranked[0][0]:.0%}",
    )


class _Search:
    """Two passes over the same images: where the outliers are, and which neurons cause them."""

    def __init__(self, model: nn.Module, norm_ratio: float) -> None:
        self._model, self._ratio = model, norm_ratio
        self._blocks = [block.module for block in supported_blocks(model)]
        self._layers = down_projections(model)
        self.masks: list[list[Outliers]] = [[] for _ in self._blocks]
        """Outliers after each block, per batch."""
        self.weights = [0.0] * len(self._blocks)
        """Sum of the outliers' ratios after each block."""
        self.largest = 0.0
        """The largest norm of a patch, relative to the median of its image."""
        self._patches: list[Tensor] = []

    def norms(self, inputs: Any) -> tuple[int, int]:
        """Find the outliers. Returns the number of images, and of tokens before the patches."""
        images = prefix = 0
        for batch in self._batches(inputs):
            layout = token_layout(self._model, batch)
            if layout is None or layout.grid is None:
                raise InputError(
                    "inputs has no patches, in which outlier norms are searched; give images to a "
                    "model that cuts them into patches"
                )
            patch = layout.codes[0] == code("patch")
            prefix = int(patch.int().argmax())
            images += layout.batch
            self._patches.append(patch)
            with self._callbacks(len(self._blocks) - 1, self._add_norms):
                call(self._model, batch)
        if not images:
            raise InputError("inputs has no images; give at least one batch")
        return images, prefix

    def _add_norms(self, block: int, tokens: Tensor) -> None:
        patch = self._patches[-1]
        norm = tokens.float().norm(dim=-1).cpu()
        if norm.shape[1] != len(patch):
            raise InputError(
                f"{type(self._model).__name__} has {norm.shape[1]} tokens after block {block}, and "
                f"its token layout {len(patch)}; its patches are not known"
            )
        ratio = norm / norm[:, patch].median(dim=1, keepdim=True).values
        ratio[:, ~patch] = 0
        outlier = ratio >= self._ratio
        self.masks[block].append(outlier)
        self.weights[block] += float(ratio[outlier].sum())
        self.largest = max(self.largest, float(ratio.max()))

    def shares(self, inputs: Any, onset: int) -> list[Tensor]:
        """Each neuron's mean share of the outliers' norm, for the blocks up to `onset`."""
        sizes = [layer.in_features for layer in self._layers[: onset + 1]]
        caused, reached, ordinary = [
            [torch.zeros(size, dtype=torch.float64) for size in sizes] for _ in range(3)
        ]
        directions = [
            write_directions(b, d) for b, d in zip(self._blocks, self._layers, strict=True)
        ]
        outliers = others = number = 0
        for number, batch in enumerate(self._batches(inputs), start=1):
            if number > len(self._patches):
                break
            mask = self.masks[onset][number - 1]
            rest = self._patches[number - 1] & ~mask
            active: dict[int, Tensor] = {}
            ends: list[Tensor] = []

            def add_end(block: int, tokens: Tensor) -> None:
                if block == onset:
                    ends.append(tokens.float()[mask])  # noqa: B023 (called before the next batch)

            def add_neurons(block: int, acts: Tensor) -> None:
                active[block] = acts.float()[mask]  # noqa: B023
                ordinary[block] += acts[rest].double().sum(0).cpu()  # noqa: B023

            with self._callbacks(onset, add_end, add_neurons):
                call(self._model, batch)
            toward = ends[0] / ends[0].square().sum(-1, keepdim=True)
            for block, acts in active.items():
                reach = toward @ directions[block]
                caused[block] += (acts * reach).double().sum(0).cpu()
                reached[block] += reach.double().sum(0).cpu()
            outliers, others = outliers + int(mask.sum()), others + int(rest.sum())
        if number != len(self._patches):
            raise InputError(
                "inputs gave other batches when they were loaded a second time; give a list"
            )
        return [
            (c - r * o / max(others, 1)) / outliers
            for c, r, o in zip(caused, reached, ordinary, strict=True)
        ]

    def _batches(self, inputs: Any) -> Iterator[Any]:
        weight = next(self._model.parameters())
        for batch in feed(self._model, inputs).batches:
            yield cast(moved(batch.load(), weight.device), weight.dtype)

    @contextmanager
    def _callbacks(
        self, last: int, on_output: Callback, on_neurons: Callback | None = None
    ) -> Iterator[None]:
        """The callbacks get outputs and neurons' activations of the blocks up to `last`."""

        def leave(block: int, module: nn.Module, args: tuple, out: Any) -> None:
            on_output(block, out[0] if isinstance(out, tuple) else out)

        def project(block: int, module: nn.Module, args: tuple) -> None:
            if on_neurons is not None:
                on_neurons(block, args[0])

        handles = []
        try:
            for block in range(last + 1):
                module, layer = self._blocks[block], self._layers[block]
                handles.append(module.register_forward_hook(partial(leave, block)))
                handles.append(layer.register_forward_pre_hook(partial(project, block)))
            with torch.no_grad():
                yield
        finally:
            for handle in handles:
                handle.remove()
