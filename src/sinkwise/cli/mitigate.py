"""`sinkwise mitigate`: what answers a sink is put into a model, and saved with it."""

import json
from pathlib import Path
from typing import Annotated

import typer

from sinkwise.cli.common import mistakes
from sinkwise.errors import InputError

SAMPLES = 64
"""Pictures looked at, where nothing else is asked for."""
BATCH_SIZE = 4
"""Pictures looked at together."""


def mitigate(
    model: Annotated[str, typer.Argument(help="hf:NAME, timm:NAME, pypi:NAME or a local folder.")],
    out: Annotated[Path, typer.Option(help="A new folder for the model.")],
    gate: Annotated[
        str | None, typer.Option(help="elementwise or headwise: a gate before each W_O.")
    ] = None,
    init: Annotated[
        str | None,
        typer.Option(help="The gate's start: identity (default; outputs stay) or paper."),
    ] = None,
    sink_logits: Annotated[
        str | None,
        typer.Option(
            help="learnable or off-by-one: a logit a head in every softmax's denominator, from 0 "
            "on or fixed there."
        ),
    ] = None,
    registers: Annotated[
        int | None, typer.Option(help="Learned tokens in front, for models that look both ways.")
    ] = None,
    test_time_register: Annotated[
        bool,
        typer.Option(
            "--test-time-register",
            help="Find the neurons that make outlier norms on --images, and move what they do to "
            "one added token; no training.",
        ),
    ] = False,
    images: Annotated[
        Path | None, typer.Option(help="A folder of pictures, for --test-time-register.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Pictures to look at, at most; default: 64.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides the random values.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of words.")
    ] = False,
) -> None:
    """Put what answers a sink into MODEL, and save it in a new folder."""
    with mistakes():
        from sinkwise.data.images import images as image_inputs
        from sinkwise.mitigations.applying import mitigate as put_in
        from sinkwise.mitigations.base import Mitigation
        from sinkwise.mitigations.gate import Gate
        from sinkwise.mitigations.loading import load
        from sinkwise.mitigations.neuron_search import find_register_neurons
        from sinkwise.mitigations.registers import Registers
        from sinkwise.mitigations.sink_logits import SinkLogits
        from sinkwise.storage.files import check_new

        chosen: list[Mitigation] = []
        if gate is not None:
            chosen.append(Gate(gate, init or "identity"))  # type: ignore[arg-type]
        elif init is not None:
            raise InputError(f"--init {init} is for a --gate, and none was given")
        if sink_logits is not None:
            chosen.append(SinkLogits(sink_logits))  # type: ignore[arg-type]
        if registers is not None:
            chosen.append(Registers(registers))
        if test_time_register != (images is not None):
            raise InputError("--test-time-register and --images DIR go together")
        if samples is not None and images is None:
            raise InputError(f"--samples {samples} is for --images, and none were given")
        if not chosen and images is None:
            raise InputError(
                "give what to put in: --gate elementwise, --sink-logits learnable, --registers 4, "
                "or several, or --test-time-register --images DIR"
            )
        check_new(out)
        module = load(model, dtype=dtype)
        if images is not None:
            pictures = image_inputs(images, samples=samples or SAMPLES, batch_size=BATCH_SIZE)
            found = find_register_neurons(module, pictures)
            if not found.neurons:
                raise InputError(f"{model} needs no test-time register: {found.evidence}")
            chosen.append(found)
        before = sum(parameter.numel() for parameter in module.parameters())
        handle = put_in(module, *chosen, seed=seed)
        handle.save(out)
        added = sum(parameter.numel() for parameter in module.parameters()) - before
        facts = {
            "model": model,
            "mitigations": list(map(repr, chosen)),
            "parameters": before,
            "parameters_added": added,
            "out": str(out),
        }
        typer.echo(json.dumps(facts, ensure_ascii=False) if as_json else _words(facts))


def _words(facts: dict) -> str:
    share = 100 * facts["parameters_added"] / facts["parameters"]
    return (
        f"{facts['model']}: {', '.join(facts['mitigations'])}, {facts['parameters_added']:,} new "
        f"parameters ({share:.1f}%).\nSaved in {facts['out']}/, which sinkwise.load and sinkwise "
        "diagnose read. Gates, logits and registers are still to be trained."
    )
