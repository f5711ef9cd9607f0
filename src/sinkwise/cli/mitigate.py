"""`sinkwise mitigate`: add gates, sink logits or registers to a model and save it."""

import json
from pathlib import Path
from typing import Annotated

import typer

from sinkwise.cli.common import MODEL_HELP, user_errors
from sinkwise.errors import InputError

SAMPLES = 64
"""Default number of images for the search."""
BATCH_SIZE = 4
"""Images per forward pass."""


def mitigate(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    out: Annotated[Path, typer.Option(help="A new folder for the model.")],
    gate: Annotated[
        str | None, typer.Option(help="elementwise or headwise: a sigmoid gate before each W_O.")
    ] = None,
    init: Annotated[
        str | None,
        typer.Option(help="Initial gate: identity (default; outputs do not change) or paper."),
    ] = None,
    sink_logits: Annotated[
        str | None,
        typer.Option(
            help="learnable or off-by-one: one logit per head in every softmax's denominator, "
            "learned from 0 or fixed at 0."
        ),
    ] = None,
    registers: Annotated[
        int | None,
        typer.Option(
            help="Number of learned tokens before the sequence; bidirectional models only."
        ),
    ] = None,
    test_time_register: Annotated[
        bool,
        typer.Option(
            "--test-time-register",
            help="Find the neurons that cause outlier norms on --images and redirect their "
            "activations to one added token; no training.",
        ),
    ] = False,
    images: Annotated[
        Path | None, typer.Option(help="A folder of images, for --test-time-register.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Maximum number of images; default: 64.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the new random weights.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of text.")
    ] = False,
) -> None:
    """Add gates, sink logits or registers to MODEL, and save it in a new folder."""
    with user_errors(kind="--gate", softmax="--sink-logits", count="--registers"):
        from sinkwise.data.images import images as image_inputs
        from sinkwise.mitigations.applying import mitigate as apply
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
            raise InputError(
                f"--init {init} applies to --gate only; give --gate elementwise or headwise as well"
            )
        if sink_logits is not None:
            chosen.append(SinkLogits(sink_logits))  # type: ignore[arg-type]
        if registers is not None:
            chosen.append(Registers(registers))
        if test_time_register != (images is not None):
            raise InputError(
                "--test-time-register and --images DIR must be given together; got one of them"
            )
        if samples is not None and images is None:
            raise InputError(
                f"--samples {samples} applies to --images only; give --images DIR as well"
            )
        if not chosen and images is None:
            raise InputError(
                "nothing to add: give one or more of --gate elementwise, --sink-logits learnable, "
                "--registers 4, --test-time-register --images DIR"
            )
        check_new(out)
        module = load(model, dtype=dtype)
        if images is not None:
            inputs = image_inputs(images, samples=samples or SAMPLES, batch_size=BATCH_SIZE)
            found = find_register_neurons(module, inputs)
            if not found.neurons:
                raise InputError(f"{model} needs no test-time register: {found.evidence}")
            chosen.append(found)
        before = sum(parameter.numel() for parameter in module.parameters())
        handle = apply(module, *chosen, seed=seed)
        handle.save(out)
        added = sum(parameter.numel() for parameter in module.parameters()) - before
        facts = {
            "model": model,
            "mitigations": list(map(repr, chosen)),
            "parameters": before,
            "parameters_added": added,
            "out": str(out),
        }
        typer.echo(json.dumps(facts, ensure_ascii=False) if as_json else _summary(facts))


def _summary(facts: dict) -> str:
    share = 100 * facts["parameters_added"] / facts["parameters"]
    return (
        f"{facts['model']}: {', '.join(facts['mitigations'])}, {facts['parameters_added']:,} new "
        f"parameters ({share:.1f}%).\nSaved in {facts['out']}/, which sinkwise.load and every "
        "sinkwise command take as MODEL. Train the new gates, logits and registers first."
    )
