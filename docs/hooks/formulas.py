"""Formulas between dollar signs become MathML when the site is built: no script draws them."""

import re
from typing import Any

INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
DISPLAY = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)


def mathml(html: str) -> str:
    """The page with MathML instead of the elements that pymdownx.arithmatex leaves."""
    from html import unescape

    from latex2mathml.converter import convert

    html = DISPLAY.sub(lambda found: convert(unescape(found[1]).strip(), display="block"), html)
    return INLINE.sub(lambda found: convert(unescape(found[1]).strip()), html)


def on_page_content(html: str, **_: Any) -> str:
    """Called by mkdocs for every rendered page."""
    return mathml(html)
