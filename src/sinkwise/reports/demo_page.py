"""The page of the demonstration, for somebody who has never heard of attention sinks."""

from collections.abc import Mapping
from typing import Any

from sinkwise.experiments.demonstration import RULE, Demonstrated
from sinkwise.reports.bar_figure import bar_figure
from sinkwise.reports.line_figure import line_figure
from sinkwise.reports.map_figure import map_figure
from sinkwise.reports.page import Figure, Page, Section
from sinkwise.reports.synthetic_table import short

Found = Mapping[str, Demonstrated]

HEADINGS = ("model", "most attended token gets", "its value ratio", "stable rank", "σ1/σ2", "error")


def _map(one: Demonstrated, title: str) -> Any:
    return map_figure(one.shown.attention[0], title)


def _largest(one: Demonstrated) -> float:
    """Mean over the samples of the attention that the most attended token receives."""
    return float(one.shown.attention.mean(1).amax(1).mean())


def _row(one: Demonstrated, name: str) -> list[str]:
    shown = one.shown
    return [
        name,
        f"{_largest(one):.0%}",
        short(float(shown.value_ratio.mean())),
        short(float(shown.stable_rank.mean())),
        short(shown.spectral_gap),
        short(one.error),
    ]


def _stripes(found: Found) -> Section:
    return Section(
        heading="Two stripes",
        paragraphs=[
            "In a transformer every token looks at all tokens, and shares out one unit of "
            "attention among them. Drawn as a map, one row for each token that reads and one "
            "column for each token that is read, a token that nearly everybody looks at is a dark "
            "vertical stripe: an attention sink. Here are two, from two small models."
        ],
        figures=[
            Figure(_map(found["nop"], "Model A"), "One sample; the stripe is token 0."),
            Figure(_map(found["broadcast"], "Model B"), "One sample; the stripe is one token."),
        ],
        after=[
            "They look the same. They are two different algorithms, and what helps against one "
            "does nothing about the other."
        ],
    )


def _algorithms(found: Found) -> Section:
    nop, broadcast = found["nop"], found["broadcast"]
    spectra = {
        name: list(enumerate((one.shown.spectrum / one.shown.spectrum.sum()).tolist(), start=1))
        for name, one in (("A", nop), ("B", broadcast))
    }
    return Section(
        heading="Two algorithms",
        paragraphs=[
            "What a token hands over to those that look at it is its value. Model A had to leave "
            "most of its tokens as they are. But attention always adds up to one: a head cannot "
            "look nowhere. So it learned to look at a token whose value is next to nothing. That "
            "is an adaptive NOP, a way to do nothing.",
            "Model B had to tell all tokens what one of them says. Everybody looks at that token "
            "to read it; its value is as large as any other, and all get the same update: a "
            "broadcast.",
        ],
        figures=[
            Figure(
                bar_figure(
                    {
                        "A: NOP": float(nop.shown.value_ratio.mean()),
                        "B: broadcast": float(broadcast.shown.value_ratio.mean()),
                    },
                    title="Value ratio",
                    x="length of the sink's value, beside the others'",
                    thresholds={"NOP": 0.2, "broadcast": 0.5},
                ),
                "The number that tells them apart: up to 0.2 a NOP, from 0.5 on a broadcast.",
            ),
            Figure(
                bar_figure(
                    {
                        "A: NOP": float(nop.shown.stable_rank.mean()),
                        "B: broadcast": float(broadcast.shown.stable_rank.mean()),
                    },
                    title="Stable rank of the update",
                    x="directions that the head writes",
                ),
                "1 means that all tokens get one direction. A broadcast has to; here A has it too, "
                "since those that it does serve all get the same mean. A sign, no proof.",
            ),
            Figure(
                line_figure(
                    spectra,
                    title="Spectrum of W_Q W_Kᵀ",
                    x="singular value",
                    y="share of their sum",
                    points=True,
                ),
                "One large first value: how a head points hard at one token. Both do.",
            ),
        ],
        table=[
            ("the task's error", "as trained", "sink's value zeroed", "an ordinary value there"),
            *(
                (
                    name,
                    short(one.error),
                    short(one.error_zeroed),
                    short(one.error_ordinary),
                )
                for name, one in (("A: NOP", nop), ("B: broadcast", broadcast))
            ),
        ],
        after=[
            "The proof is to change the sink's value. Without it A works as before, and with an "
            "ordinary value there it fails: the point of its sink is that nothing is there. B "
            "fails either way: its sink carries the message. (An error of 1 is what adding nothing "
            "would cost.)"
        ],
    )


def _answers(found: Found) -> Section:
    names = {
        "nop": "A, as it was",
        "nop-gate": "A with a gate (right)",
        "nop-register": "A with a register (wrong)",
        "broadcast": "B, as it was",
        "broadcast-gate": "B with a gate (wrong)",
        "broadcast-register": "B with a register (right)",
    }
    captions = {
        "nop-gate": "The stripe is gone: a closed gate says nothing, so nobody needs to look away.",
        "nop-register": "The stripe moved to the register, column 0, and is the same NOP.",
        "broadcast-gate": "The stripe stays: the message still has to come from that token.",
        "broadcast-register": "The stripe moved to the register, column 0, which now carries the "
        "message. Here a token sees only itself and the register, and the map is layer 1's.",
    }
    return Section(
        heading="Two answers",
        paragraphs=[
            "A gate is a learned factor between 0 and 1 on what a head writes: with it a head can "
            "do nothing and look anywhere. A register is an additional token without content of "
            "its own: what is broadcast can go through it. Here is each model, trained again with "
            "each."
        ],
        figures=[
            Figure(_map(found[name], names[name]), caption) for name, caption in captions.items()
        ],
        table=[HEADINGS, *(_row(found[name], words) for name, words in names.items())],
        after=[
            "The value ratio is that of token 0, of the marked token or of the register. σ1/σ2 is "
            "the first singular value over the second."
        ],
    )


def demo_page(found: Found) -> Page:
    """The page, from all shipped models by name."""
    return Page(
        title="The same stripe, two algorithms",
        lead=[
            "Know why an attention sink exists before you fix it. This page was made on your "
            "machine, from small models that come with sinkwise."
        ],
        sections=[
            _stripes(found),
            _algorithms(found),
            _answers(found),
            Section(
                heading="Your own model",
                paragraphs=[
                    "sinkwise does the same for any transformer: it finds the sinks, tells which "
                    "of the two each one is, and says what to do."
                ],
                code="sinkwise diagnose hf:HuggingFaceTB/SmolLM2-135M --text book.txt\n"
                "sinkwise diagnose timm:vit_base_patch14_reg4_dinov2 --images photos/",
            ),
        ],
        footer="Means over 64 samples that the models have not been trained on; the tasks are of "
        "arXiv 2606.08105, in small. A token counts as a sink when "
        f"{RULE.share:.0%} of the queries give it at least {RULE.attention:g}. "
        "Written by `sinkwise demo`.",
    )
