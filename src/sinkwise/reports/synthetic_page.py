"""The page of a synthetic experiment: loss, maps and spectrum before and after, the verdict."""

from collections.abc import Sequence
from typing import Any

from sinkwise.experiments.running import Trained
from sinkwise.reports.line_figure import line_figure
from sinkwise.reports.map_figure import map_figure
from sinkwise.reports.page import Figure, Page, Section
from sinkwise.reports.synthetic_table import HEADINGS, summary_rows
from sinkwise.synthetic.signature import Signature


def loss_chart(runs: Sequence[Trained]) -> Any:
    """The losses of all seeds."""
    curves = {f"seed {run.seed}": run.losses for run in runs}
    return line_figure(curves, title="Loss", x="training step", y="loss", log=True)


def spectrum_chart(before: Signature, after: Signature, layer: int) -> Any:
    """Singular values of one layer's interaction matrix, largest first."""
    curves = {
        name: list(enumerate((found.spectrum / found.spectrum.sum()).tolist(), start=1))
        for name, found in (("before", before), ("after", after))
    }
    return line_figure(
        curves,
        title=f"Spectrum of W_Q W_Kᵀ, layer {layer}",
        x="singular value",
        y="share of their sum",
        points=True,
    )


def map_charts(run: Trained) -> list[tuple[str, Any]]:
    """Attention maps of the first sample, a layer each, before and after."""
    charts = []
    for layer, pair in enumerate(zip(run.before, run.after, strict=True)):
        for word, found in zip(("before", "after"), pair, strict=True):
            chart = map_figure(found.attention[0], f"Layer {layer}, {word} training")
            charts.append((f"map-{layer}-{word}", chart))
    return charts


def charts(runs: Sequence[Trained]) -> dict[str, Any]:
    """All charts of an experiment by file name; maps and spectra are the first seed's."""
    first = runs[0]
    found = {"loss": loss_chart(runs)}
    for layer, pair in enumerate(zip(first.before, first.after, strict=True)):
        found[f"spectrum-{layer}"] = spectrum_chart(*pair, layer)
    return found | dict(map_charts(first))


def synthetic_page(runs: Sequence[Trained], found: dict[str, Any]) -> Page:
    """The page of one experiment over its seeds, with its charts."""
    one = runs[0].experiment
    summary = (runs[0].experiment.task.__doc__ or "").split("Reference:")[0].strip()
    right = sum(run.right for run in runs)
    verdict = runs[0].scan.verdict()
    maps = [Figure(chart) for name, chart in found.items() if name.startswith("map")]
    spectra = [Figure(chart) for name, chart in found.items() if name.startswith("spectrum")]
    return Page(
        title=f"Synthetic task: {one.kind}, form {one.form}, mitigation {one.mitigation}",
        lead=[" ".join(part.split()) for part in summary.split("\n\n")],
        sections=[
            Section(
                heading="What the scan says",
                paragraphs=[
                    f"Expected: {one.expected}. The scan says so in {right} of {len(runs)} seeds.",
                    f"Prescription for seed {runs[0].seed}: {verdict.prescription}. "
                    f"{verdict.advice}",
                ],
                table=[HEADINGS, *summary_rows(runs)],
                after=["Means over the seeds, with the least and the greatest."],
            ),
            Section(heading="Attention before and after training", figures=maps),
            Section(heading="Loss and spectrum", figures=[Figure(found["loss"]), *spectra]),
        ],
        footer="Written by `sinkwise synthetic`; every number follows from the seeds.",
    )
