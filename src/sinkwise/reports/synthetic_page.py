"""The page of a synthetic experiment: verdict, attention maps, loss and spectrum."""

from collections.abc import Sequence
from typing import Any

from sinkwise.experiments.experiment_run import ExperimentRun
from sinkwise.reports.line_figure import line_figure
from sinkwise.reports.map_figure import map_figure
from sinkwise.reports.page import Figure, Page, Section
from sinkwise.reports.synthetic_table import COLUMN_NOTES, HEADINGS, RANGES, summary_rows
from sinkwise.synthetic.signature import Signature


def loss_chart(runs: Sequence[ExperimentRun]) -> Any:
    """The loss curves of all seeds."""
    curves = {f"seed {run.seed}": run.losses for run in runs}
    return line_figure(curves, title="Loss", x="training step", y="loss", log=True)


def spectrum_chart(before: Signature, after: Signature, layer: int) -> Any:
    """Singular values of one layer's interaction matrix, largest first."""
    curves = {
        name: list(enumerate((one.spectrum / one.spectrum.sum()).tolist(), start=1))
        for name, one in (("before", before), ("after", after))
    }
    return line_figure(
        curves,
        title=f"Spectrum of W_Q W_Kᵀ, layer {layer}",
        x="index of the singular value",
        y="share of the sum",
        points=True,
    )


def map_charts(run: ExperimentRun) -> list[tuple[str, Any]]:
    """Attention maps of the first sample, for each layer before and after training."""
    charts = []
    for layer, pair in enumerate(zip(run.before, run.after, strict=True)):
        for word, signature in zip(("before", "after"), pair, strict=True):
            chart = map_figure(signature.attention[0], f"Layer {layer}, {word} training")
            charts.append((f"map-{layer}-{word}", chart))
    return charts


def synthetic_charts(runs: Sequence[ExperimentRun]) -> dict[str, Any]:
    """All charts of an experiment by file name; maps and spectra are the first seed's."""
    first = runs[0]
    charts = {"loss": loss_chart(runs)}
    for layer, pair in enumerate(zip(first.before, first.after, strict=True)):
        charts[f"spectrum-{layer}"] = spectrum_chart(*pair, layer)
    return charts | dict(map_charts(first))


def synthetic_page(runs: Sequence[ExperimentRun], charts: dict[str, Any]) -> Page:
    """The page of one experiment over its seeds, with its charts."""
    experiment = runs[0].experiment
    right = sum(run.right for run in runs)
    verdict = runs[0].scan.verdict()
    maps = [Figure(chart) for name, chart in charts.items() if name.startswith("map")]
    spectra = [Figure(chart) for name, chart in charts.items() if name.startswith("spectrum")]
    return Page(
        title=f"Synthetic task: {experiment.kind}, form {experiment.form}, "
        f"mitigation {experiment.mitigation}",
        lead=[experiment.task.summary],
        sections=[
            Section(
                heading="Verdict of the scan",
                paragraphs=[
                    f"Expected: {experiment.expected}. The scan agrees in {right} of {len(runs)} "
                    "seeds.",
                    f"Prescription for seed {runs[0].seed}: {verdict.prescription}. "
                    f"{verdict.advice}",
                ],
                table=[HEADINGS, *summary_rows(runs)],
                after=[RANGES, COLUMN_NOTES],
            ),
            Section(heading="Attention before and after training", figures=maps),
            Section(heading="Loss and spectrum", figures=[Figure(charts["loss"]), *spectra]),
        ],
        footer="Written by “sinkwise synthetic”. The seeds determine every number.",
    )
