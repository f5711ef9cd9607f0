"""The page of the demonstration, for readers who have never heard of attention sinks."""

from collections.abc import Callable, Mapping
from typing import Any

from sinkwise.experiments.demonstration import RULE, RULES, DemoResult
from sinkwise.reports.bar_figure import bar_figure
from sinkwise.reports.line_figure import line_figure
from sinkwise.reports.map_figure import map_figure
from sinkwise.reports.page import Figure, Page, Section
from sinkwise.reports.synthetic_table import format_number
from sinkwise.reports.thresholds import value_ratio_thresholds
from sinkwise.synthetic.shipped import DEMO_BATCH

Results = Mapping[str, DemoResult]

HEADINGS = ("model", "largest mean attention", "value ratio", "stable rank", "σ₁/σ₂", "error")

MODELS = {
    "nop": "A, as above",
    "nop-gate": "A with a gate (right)",
    "nop-register": "A with a register (wrong)",
    "broadcast": "B, as above",
    "broadcast-gate": "B with a gate (wrong)",
    "broadcast-register": "B with a register (right)",
}
"""The page's name of each shipped model."""

CAPTIONS = {
    "nop-gate": "The stripe is gone. A head with a closed gate adds nothing, wherever it attends, "
    "so it needs no sink.",
    "nop-register": "The stripe has moved to the register, the first column. It is still a NOP.",
    "broadcast-gate": "The stripe stays: the message still has to come from the marked token.",
    "broadcast-register": "The stripe has moved to the register, the first column, which now "
    "carries the message. In this model a token sees only itself and the register. The map is that "
    "of the second layer; in the first, the register collects the message.",
}
"""The caption of each retrained model's map."""


def demo_page(results: Results) -> Page:
    """The page, from the results of all shipped models by name."""
    return Page(
        title="The same stripe, two algorithms",
        lead=[
            "An attention sink is a token to which nearly all other tokens of a sequence attend. "
            "Two different algorithms produce such a sink, and each needs a different remedy. So "
            "know why a sink exists before you fix it. This page was made on your machine, from "
            "six small models that ship with sinkwise."
        ],
        sections=[
            _stripes(results),
            _algorithms(results["nop"], results["broadcast"]),
            _proof(results["nop"], results["broadcast"]),
            _remedies(results),
            Section(
                heading="Your own model",
                paragraphs=[
                    "sinkwise does the same for any transformer: it finds the sinks, determines "
                    "which of the two algorithms each one is, and prescribes a remedy."
                ],
                code="sinkwise diagnose hf:HuggingFaceTB/SmolLM2-135M --text book.txt\n"
                "sinkwise diagnose timm:vit_base_patch14_reg4_dinov2 --images photos/",
            ),
        ],
        footer=f"All numbers are means over {DEMO_BATCH} samples on which the models were not "
        "trained. The tasks are small forms of those in “A Unifying View of Attention Sinks: Two "
        "Algorithms, Two Solutions” (2026, arXiv 2606.08105). A token counts as a sink if at least "
        f"{RULE.share:.0%} of the queries give it {RULE.attention:g} or more of their attention, "
        f"and if it receives at least {RULE.min_times_uniform:g} times as much as under uniform "
        "attention. Written by “sinkwise demo”.",
    )


def _map(result: DemoResult, title: str) -> Any:
    return map_figure(result.signature.attention[0], title)


def _stripes(results: Results) -> Section:
    return Section(
        heading="Two stripes",
        paragraphs=[
            "In a transformer, tokens exchange information by attention. Each token in turn is the "
            "query: it distributes one unit of attention over all tokens, which are its keys. A "
            "map of this has one row per query and one column per key. A token that receives most "
            "of the attention of nearly every query is a dark vertical stripe: an attention sink. "
            "Here are the maps of two small models."
        ],
        figures=[
            Figure(_map(results["nop"], "Model A"), "One sample. The stripe is the first token."),
            Figure(
                _map(results["broadcast"], "Model B"),
                "One sample. The stripe is a marked token, at a random position in each sample.",
            ),
        ],
        after=[
            "The stripes look alike. But the two models run different algorithms, and the remedy "
            "for one does nothing for the other."
        ],
    )


def _algorithms(nop: DemoResult, broadcast: DemoResult) -> Section:
    rule = RULES.mechanism
    spectra = {
        name: list(enumerate((spectrum / spectrum.sum()).tolist(), start=1))
        for name, spectrum in (
            ("A", nop.signature.spectrum),
            ("B", broadcast.signature.spectrum),
        )
    }

    def bars(number: Callable[[DemoResult], float]) -> dict[str, float]:
        return {"A: NOP": number(nop), "B: broadcast": number(broadcast)}

    return Section(
        heading="Two algorithms",
        paragraphs=[
            "Each key has a value, a vector. A query receives the values of all keys, weighted by "
            "the attention that it gives them, and this update is added to its own state.",
            "Model A must leave most tokens unchanged. But the attention of a query always sums to "
            "one, so it cannot attend to nothing. Instead, the queries of these tokens attend to a "
            "token whose value is almost zero, and receive almost nothing. This is an adaptive "
            "NOP: a way to do nothing (“no operation”).",
            "Model B must send the content of one marked token to all tokens. Every query attends "
            "to that token, whose value is about as large as any other, and all receive the same "
            "update. This is a broadcast.",
        ],
        figures=[
            Figure(
                bar_figure(
                    bars(lambda result: float(result.signature.value_ratio.mean())),
                    title="Value ratio",
                    x="norm of the sink's value / mean norm of the others'",
                    thresholds=value_ratio_thresholds(rule),
                ),
                "The number that separates the two: the norm (length) of the sink's value divided "
                f"by the mean norm of the other tokens' values. At {rule.nop_ratio:g} or less the "
                f"sink is a NOP; at {rule.broadcast_ratio:g} or more it can be a broadcast.",
            ),
            Figure(
                bar_figure(
                    bars(lambda result: float(result.signature.stable_rank.mean())),
                    title="Stable rank of the update",
                    x="effective number of directions",
                ),
                "At 1, all queries receive an update in the same direction. A broadcast has a "
                f"stable rank of at most {rule.broadcast_rank:g}, but the reverse does not hold: A "
                "has one as well, because the few queries that it does update all receive the same "
                "mean.",
            ),
            Figure(
                line_figure(
                    spectra,
                    title="Spectrum of W_Q W_Kᵀ",
                    x="index of the singular value",
                    y="share of the sum",
                    points=True,
                ),
                "The singular values of the matrix that scores a query against a key. A dominant "
                "first value lets all queries single out one token. Both models have one.",
            ),
        ],
    )


def _proof(nop: DemoResult, broadcast: DemoResult) -> Section:
    return Section(
        heading="The proof: change the sink's value",
        paragraphs=[
            "If this explanation is right, A does not need its sink's value and B does. So set the "
            "value to zero, or replace it with that of an ordinary token, and measure the error of "
            "the task. 0 is perfect; 1 is the error of a model that updates nothing."
        ],
        table=[
            ("error", "as trained", "sink's value set to zero", "ordinary value in its place"),
            *(
                (
                    name,
                    format_number(result.error),
                    format_number(result.error_zeroed),
                    format_number(result.error_ordinary),
                )
                for name, result in (("A: NOP", nop), ("B: broadcast", broadcast))
            ),
        ],
        after=[
            "With a value of zero A works as before, and with an ordinary value it fails: its sink "
            "is useful because it has nothing to give. B fails in both cases: its sink carries the "
            "message."
        ],
    )


def _remedies(results: Results) -> Section:
    return Section(
        heading="Two remedies",
        paragraphs=[
            "A gate is a learned factor between 0 and 1 on the output of an attention head: with a "
            "closed gate, a query receives nothing, wherever it attends. A register is an extra "
            "token without content of its own: a broadcast can go through it instead of through a "
            "content token. Both models were trained again with each."
        ],
        figures=[
            Figure(_map(results[name], MODELS[name]), caption) for name, caption in CAPTIONS.items()
        ],
        table=[HEADINGS, *(_row(results[name], words) for name, words in MODELS.items())],
        after=[
            "The largest mean attention is what the most attended token receives, averaged over "
            "the queries. The value ratio is that of the first token, of the marked token or of "
            "the register, with values after the head's output projection. σ₁/σ₂ is the ratio of "
            "the two largest singular values."
        ],
    )


def _row(result: DemoResult, name: str) -> list[str]:
    signature = result.signature
    largest = float(signature.attention.mean(1).amax(1).mean())
    return [
        name,
        f"{largest:.0%}",
        format_number(float(signature.value_ratio.mean())),
        format_number(float(signature.stable_rank.mean())),
        format_number(signature.spectral_gap),
        format_number(result.error),
    ]
