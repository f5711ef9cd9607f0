"""Charts rendered as PNG and SVG, without a browser."""

from typing import Any

PIXEL_SCALE = 2.0
"""Pixels of a PNG per pixel of the chart's own size."""


def png(chart: Any) -> bytes:
    """A chart as PNG bytes."""
    import vl_convert

    return vl_convert.vegalite_to_png(chart.to_json(), scale=PIXEL_SCALE)


def svg(chart: Any) -> str:
    """A chart as an SVG element for a page."""
    import vl_convert

    return vl_convert.vegalite_to_svg(chart.to_json())
