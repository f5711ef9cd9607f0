"""`find_register_neurons`: which neurons make the outlier norms of a model's patches."""

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
from sinkwise.mitigations.prepended_tokens import CHILD, one_tower
from sinkwise.mitigations.register_neurons import RegisterNeurons, down_projections, written

Outliers = Bool[Tensor, "image token"]
Watch = Callable[[int, Tensor], None]


def find_register_neurons(
    model: nn.Module,
    inputs: Any,
    *,
    norm_ratio: float = 3.0,
    image_share: float = 0.1,
    neuron_share: float = 0.01,
    max_neurons: int = 50,
) -> RegisterNeurons:
    """The neurons that make the outlier norms over `inputs`, for `mitigate`; the model stays as is.

    A patch is an outlier behind a block when ||x|| >= norm_ratio * the median of its image. They
    appear at the first block whose outliers' ratios add up to half of the largest such sum. There,
    with e = x / ||x|| of an outlier and w_n what neuron n of an earlier block (or this one) adds to
    the stream for an activation of 1, the neuron's share of the outlier's norm is
    (a_n - mean of a_n over the other patches) <w_n, e> / ||x||, averaged over all outliers. Taken
    are the neurons with a share of at least `neuron_share`, the largest first, `max_neurons` at
    most. (The paper ranks neurons by |a_n| alone; what a neuron writes, and where to, is in the
    share.) The result's `evidence` says what was found.

    Where fewer than `image_share` of the images have an outlier, as in most small models, or no
    neuron makes them, the result has no neurons, says so, and changes nothing when it is applied.

    `inputs` are `sinkwise.images(...)` or a list of batches; they are read twice. Raises InputError
    for models in training mode, without patches, mitigated ones, and those that take no registers.

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
        raise InputError(f"{type(model).__name__} is in training mode: eval() makes it repeatable")
    if hasattr(model, CHILD):
        raise InputError(f"{type(model).__name__} has registers: look at the plain model, undo()")
    search = _Search(model, norm_ratio)
    images, prefix = search.norms(inputs)
    weights = search.weights
    onset = next(block for block, weight in enumerate(weights) if 2 * weight >= max(weights))
    hit = sum(int(mask.any(-1).sum()) for mask in search.masks[onset])
    count = sum(int(mask.sum()) for mask in search.masks[onset])
    if hit < image_share * images or not hit:
        return RegisterNeurons(
            (),
            prefix,
            f"no outliers: {hit} of {images} images have a patch whose norm is {norm_ratio:g} "
            f"times the median; the largest is {search.largest:.1f} times",
        )
    shares = search.shares(inputs, onset)
    ranked = [
        (float(share[n]), block, int(n))
        for block, share in enumerate(shares)
        for n in torch.nonzero(share >= neuron_share)[:, 0]
    ]
    ranked = sorted(ranked, key=lambda one: (-one[0], *one[1:]))[:max_neurons]
    where = (
        f"{count} outlier patches in {hit} of {images} images behind block {onset}, the "
        f"largest {search.largest:.1f} times the median"
    )
    if not ranked:
        return RegisterNeurons(
            (), prefix, f"{where}; no neuron makes {neuron_share:.0%} of their norm"
        )
    total = sum(share for share, _, _ in ranked)
    return RegisterNeurons(
        tuple((block, n) for _, block, n in ranked),
        prefix,
        f"{where}; {len(ranked)} neurons make {total:.0%} of their norm, the first "
        f"{ranked[0][0]:.0%}",
    )


class _Search:
    """Two passes over the same images: where outliers are, and who made them."""

    def __init__(self, model: nn.Module, norm_ratio: float) -> None:
        self._model, self._ratio = model, norm_ratio
        self._blocks = [block.module for block in one_tower(model)]
        self._layers = down_projections(model)
        self.masks: list[list[Outliers]] = [[] for _ in self._blocks]
        """Outliers behind each block, batch by batch."""
        self.weights = [0.0] * len(self._blocks)
        """Sum of the outliers' ratios behind each block."""
        self.largest = 0.0
        """The largest norm of a patch, in medians of its image."""
        self._patches: list[Tensor] = []

    def norms(self, inputs: Any) -> tuple[int, int]:
        """Find the outliers; the numbers of images and of tokens before the patches."""
        images = prefix = 0
        for batch in self._batches(inputs):
            layout = token_layout(self._model, batch)
            if layout is None or layout.grid is None:
                raise InputError("outlier norms are looked for on patches: give pictures")
            patch = layout.codes[0] == code("patch")
            prefix = int(patch.int().argmax())
            images += layout.batch
            self._patches.append(patch)
            with self._watched(len(self._blocks) - 1, self._note_norms):
                call(self._model, batch)
        if not images:
            raise InputError("inputs holds no pictures")
        return images, prefix

    def _note_norms(self, block: int, stream: Tensor) -> None:
        patch = self._patches[-1]
        norm = stream.float().norm(dim=-1).cpu()
        if norm.shape[1] != len(patch):
            raise InputError(
                f"{type(self._model).__name__} made {norm.shape[1]} tokens where its layout has "
                f"{len(patch)}"
            )
        ratio = norm / norm[:, patch].median(dim=1, keepdim=True).values
        ratio[:, ~patch] = 0
        outlier = ratio >= self._ratio
        self.masks[block].append(outlier)
        self.weights[block] += float(ratio[outlier].sum())
        self.largest = max(self.largest, float(ratio.max()))

    def shares(self, inputs: Any, onset: int) -> list[Tensor]:
        """Each neuron's share of the outliers' norm, for the blocks up to `onset`."""
        sizes = [layer.in_features for layer in self._layers[: onset + 1]]
        made, facing, ordinary = [
            [torch.zeros(size, dtype=torch.float64) for size in sizes] for _ in range(3)
        ]
        maps = [written(b, d) for b, d in zip(self._blocks, self._layers, strict=True)]
        outliers = others = number = 0
        for number, batch in enumerate(self._batches(inputs), start=1):
            if number > len(self._patches):
                break
            mask = self.masks[onset][number - 1]
            rest = self._patches[number - 1] & ~mask
            active: dict[int, Tensor] = {}
            ends: list[Tensor] = []

            def note_end(block: int, stream: Tensor) -> None:
                if block == onset:
                    ends.append(stream.float()[mask])  # noqa: B023 (called before the next batch)

            def note_neurons(block: int, acts: Tensor) -> None:
                active[block] = acts.float()[mask]  # noqa: B023
                ordinary[block] += acts[rest].double().sum(0).cpu()  # noqa: B023

            with self._watched(onset, note_end, note_neurons):
                call(self._model, batch)
            toward = ends[0] / ends[0].square().sum(-1, keepdim=True)
            for block, acts in active.items():
                reach = toward @ maps[block]
                made[block] += (acts * reach).double().sum(0).cpu()
                facing[block] += reach.double().sum(0).cpu()
            outliers, others = outliers + int(mask.sum()), others + int(rest.sum())
        if number != len(self._patches):
            raise InputError("inputs gave other batches when they were read again: give a list")
        return [
            (m - f * o / max(others, 1)) / outliers
            for m, f, o in zip(made, facing, ordinary, strict=True)
        ]

    def _batches(self, inputs: Any) -> Iterator[Any]:
        weight = next(self._model.parameters())
        for batch in feed(self._model, inputs).batches:
            yield cast(moved(batch.load(), weight.device), weight.dtype)

    @contextmanager
    def _watched(
        self, last: int, on_stream: Watch, on_neurons: Watch | None = None
    ) -> Iterator[None]:
        """While the block runs: callbacks with the output and the activations of each block."""

        def leave(block: int, module: nn.Module, args: tuple, out: Any) -> None:
            on_stream(block, out[0] if isinstance(out, tuple) else out)

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
