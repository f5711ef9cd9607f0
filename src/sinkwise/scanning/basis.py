"""What all batches of a scan are measured by, learned once from the first sample."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from sinkwise.capturing.jacobian import measured_sites
from sinkwise.core.records import AttentionSite
from sinkwise.scanning.observed import Observed


@dataclass(frozen=True)
class Basis:
    """What a scan must know of the model beyond its layout; every stored batch carries it."""

    measured: tuple[str, ...] = ()
    """Modules whose weights no known layout describes: their Jacobian was measured."""
    unfaithful: tuple[str, ...] = ()
    """Modules whose captured fields do not give the whole score: their map is used."""


def learn_basis(
    model: nn.Module, sites: dict[str, AttentionSite], first: Observed, sample: Callable[[], Any]
) -> Basis:
    """Learn the basis from `first`, what was observed on the first sample (or the first batch).

    Weights that `sites` lacks are measured on `sample`, the first sample, and added to `sites`.
    """
    unknown = [name for name in first.attending if name and name not in sites]
    found = measured_sites(model, unknown, sample()) if unknown else {}
    sites.update(found)
    return Basis(tuple(sorted(found)), tuple(sorted(first.unfaithful)))


def measure_sites(
    model: nn.Module, sites: dict[str, AttentionSite], basis: Basis, sample: Callable[[], Any]
) -> None:
    """Measure the weights that a known basis names, as the process that learned it has."""
    missing = [name for name in basis.measured if name not in sites]
    if missing:
        sites.update(measured_sites(model, missing, sample()))
