"""Charts rendered as PNG and SVG, without a browser."""

from typing import Any


def png(chart: Any, scale: float = 2.0) -> bytes:
    """A chart as PNG bytes."""
    import vl_convert

    return vl_convert.vegalite_to_png(chart.to_json(), scale=scale)


def svg(chart: Any) -> str:
    """A chart as an SVG element for a page."""
    import vl_convert

    return vl_convert.vegalite_to_svg(chart.to_json())
