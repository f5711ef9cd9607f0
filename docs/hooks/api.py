"""`::: sinkwise.NAME` documents what the facade exports under that name.

The facade imports its names lazily, so a reader of the source cannot follow them; here they are
looked up in the running package.
"""

import importlib
import re
from typing import Any

EXPORTED = re.compile(r"^::: (sinkwise(?:\.nn)?)\.(\w+)$", re.MULTILINE)


def directives(markdown: str) -> str:
    """The page with each exported name replaced by the path of its definition."""

    def directive(found: re.Match[str]) -> str:
        package, name = found.groups()
        value = getattr(importlib.import_module(package), name)
        short = package.replace("sinkwise", "sw", 1)
        return (
            f'<a id="{package}.{name}"></a>\n\n'
            f"::: {value.__module__}.{value.__qualname__}\n"
            f"    options:\n"
            f'      heading: "{short}.{name}"\n'
            f'      toc_label: "{name}"\n'
        )

    return EXPORTED.sub(directive, markdown)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for every page before it is rendered."""
    return directives(markdown)
