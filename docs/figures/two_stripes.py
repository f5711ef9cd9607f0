"""The picture at the top of README: two identical stripes, two value ratios.

    python docs/figures/two_stripes.py

Both maps, the norms below them and the ratios are computed from the trained models that ship with
sinkwise, the two that `sinkwise demo` opens with.
"""

from dataclasses import dataclass
from typing import Any

import altair as alt
import torch
from jaxtyping import Float
from page_tables import DOCS, write
from torch import Tensor

from sinkwise.synthetic.model import Attention
from sinkwise.synthetic.shipped import load_shipped
from sinkwise.synthetic.signature import signatures

OUT = DOCS / "two-stripes.png"
SINK, OTHER = "#c8452c", "#9fb3cf"
TITLES = {
    "nop": ("Model A: adaptive NOP", "the value is nearly zero: nothing is written. Fix: a gate"),
    "broadcast": ("Model B: broadcast", "the value is a message for every token. Fix: registers"),
}


@dataclass(frozen=True, eq=False, kw_only=True)
class Stripe:
    """One head on one sample, and its sink."""

    attention: Float[Tensor, "query key"]
    value_norms: Float[Tensor, " key"]
    """‖W_O v_j‖ over the mean of the other tokens: the sink's own entry is its value ratio."""
    sink: int
    value_ratio: float
    """Mean over all samples."""


def stripe(name: str) -> Stripe:
    """Layer 0 of a shipped model, on the sample whose value ratio is nearest to the mean."""
    model, task, sample = load_shipped(name)
    sinks = task.sink(sample)
    signature = signatures(model, sample.inputs, sinks)[0]
    ratios = signature.value_ratio
    one = int((ratios - ratios.mean()).abs().argmin())
    sink = int(sinks[one])
    norms = _output_norms(model, sample.inputs)[one]
    others = torch.cat([norms[:sink], norms[sink + 1 :]]).mean()
    return Stripe(
        attention=signature.attention[one],
        value_norms=norms / others,
        sink=sink,
        value_ratio=float(ratios.mean()),
    )


@torch.no_grad()
def _output_norms(model: torch.nn.Module, inputs: Tensor) -> Float[Tensor, "batch token"]:
    """‖W_O v‖ of each token in the first attention layer."""
    layer = next(module for module in model.modules() if isinstance(module, Attention))
    kept: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _module, args: kept.append(args[0]))
    model(inputs)
    handle.remove()
    return layer.o_proj(layer.v_proj(kept[0])).norm(dim=-1)


def _map(one: Stripe) -> Any:
    rows = [
        {"query": query, "key": key, "attention": round(weight, 3)}
        for query, line in enumerate(one.attention.tolist())
        for key, weight in enumerate(line)
    ]
    axis = alt.Axis(ticks=False, domain=False, labels=False)
    colors = alt.Scale(domain=[0, 1], range=["#f4f6fa", "#3b6fb6", "#12263f"])
    return (
        alt.Chart(alt.Data(values=rows))
        .mark_rect(strokeWidth=0.5)
        .encode(
            x=alt.X("key:O", title=None, axis=axis),
            y=alt.Y("query:O", title="query (the token that attends)", axis=axis),
            color=alt.Color("attention:Q", scale=colors, legend=None),
            stroke=alt.Stroke("attention:Q", scale=colors, legend=None),  # closes the seams
        )
        .properties(width=330, height=230)
    )


def _norms(one: Stripe) -> Any:
    rows = [
        {"key": key, "norm": norm, "sink": key == one.sink}
        for key, norm in enumerate(one.value_norms.tolist())
    ]
    axis = alt.Axis(ticks=False, labels=False, titlePadding=6)
    y = alt.Y("norm:Q", title="value norm", scale=alt.Scale(domain=[0, 2]))
    base = alt.Chart(alt.Data(values=rows)).encode(
        x=alt.X("key:O", title="key (the token attended to)", axis=axis)
    )
    bars = base.mark_bar(clip=True).encode(
        y=y,
        color=alt.condition("datum.sink", alt.value(SINK), alt.value(OTHER)),
    )
    left = one.sink < len(rows) / 4
    mark = base.transform_filter("datum.sink").mark_text(
        text="▼ the sink's value" if left else "the sink's value ▼",
        color=SINK,
        fontSize=12,
        fontWeight="bold",
        align="left" if left else "right",
        dx=-5 if left else 6,
    )
    return (bars + mark.encode(y=alt.value(10))).properties(width=330, height=80)


def figure(stripes: dict[str, Stripe]) -> Any:
    """Both maps side by side, each above the norms of its values."""
    columns = []
    for name, one in stripes.items():
        title, words = TITLES[name]
        ratio = f"value ratio {one.value_ratio:.{4 if one.value_ratio < 0.01 else 2}f}"
        columns.append(
            alt.vconcat(_map(one), _norms(one), spacing=4).properties(
                title=alt.Title(
                    [title, ratio],
                    subtitle=words,
                    fontSize=17,
                    subtitleFontSize=13,
                    anchor="middle",
                )
            )
        )
    return (
        alt.hconcat(*columns, spacing=40)
        .configure_view(stroke=None)
        .configure_axis(titleFontSize=12, titleFontWeight="normal", grid=False)
    )


def main() -> None:
    """Draw both models and save the picture."""
    stripes = {name: stripe(name) for name in TITLES}
    rows = [
        {
            "model": name,
            "value_ratio": one.value_ratio,
            "shown": float(one.value_norms[one.sink]),
        }
        for name, one in stripes.items()
    ]
    write(figure(stripes), rows, OUT)


if __name__ == "__main__":
    main()
