"""Find attention sinks in a language model.

Scan SmolLM2-135M on a page of *Pride and Prejudice*, follow its first token through the layers, and
inspect the queries and keys of one attention call. `--model` takes any causal model that `sw.load`
can load.
"""

import argparse
from pathlib import Path

import torch

import sinkwise as sw
from sinkwise.hosts.loading.source import source_of

BOOK = Path(__file__).parents[1] / "tests" / "texts" / "pride.txt"
parser = argparse.ArgumentParser()
parser.add_argument("--model", default="pypi:smollm2-135m")
parser.add_argument("--text", type=Path, default=BOOK, help="a UTF-8 text file")
parser.add_argument("--length", type=int, default=133, help="tokens per sample")
options = parser.parse_args()

# `sw.text` cuts the file into consecutive windows of `length` tokens.

model = sw.load(options.model)
scan = sw.scan(model, sw.text(options.text, length=options.length, samples=4, batch_size=2))

# The `layers` frame follows the residual stream and the first token. Sinks in language models come
# with a jump of the first token's norm: the layer after which it happens is the one whose MLP
# writes it, and in the layers that follow most heads attend to that token.

print("layer  attention to token 0  norm of token 0 / median  heads with a sink")
for row in scan.layers.iter_rows(named=True):
    heads = scan.heads.filter(scan.heads["layer"] == row["layer"])
    sinks = int((heads["verdict"] != "none").sum())
    jump = row["token_norm_first"] / row["token_norm_median"]
    bar = "#" * round(30 * row["received_first"])
    print(
        f"{row['layer']:5}  {row['received_first']:20.2f}  {jump:24.1f}  "
        f"{sinks:9}/{len(heads)}  {bar}"
    )

# The verdict weighs all heads. It always comes with the figures that led to it.

verdict = scan.verdict()
print(f"\nPrescription: {verdict.prescription}. {verdict.advice}")
print(*(f"- {line}" for line in verdict.evidence), sep="\n")

# For a closer look, `sw.capture` calls a function with every attention call while the model runs.
# Here we recompute one head's attention map from the call's own queries and keys and print how much
# the last token of the text gives to the first.

heads = scan.heads.filter(scan.heads["verdict"] == "nop").sort("received", descending=True)
layer, head = heads.row(0)[0], heads["head"][0]


def show(record: sw.AttentionRecord) -> None:
    """Print one row of one map."""
    if record.layer != layer:
        return
    k = record.k.repeat_interleave(record.group, dim=1)
    scores = record.q[0, head, -1] @ k[0, head].T * record.scale
    weights = scores.softmax(-1)
    print(
        f"\nLayer {layer}, head {head}: the last token gives {float(weights[0]):.2f} to the first "
        f"and at most {float(weights[1:].max()):.2f} to any other."
    )


tokenizer = source_of(model).tokenizer
text = options.text.read_text(encoding="utf-8")[:10_000]
ids = tokenizer(text, return_tensors="pt")["input_ids"][:, : options.length]
with torch.no_grad(), sw.capture(model, show):
    model(ids)
