"""A script as a page: its docstring and its comments at the margin are prose, the rest is code."""

import re


def page(source: str) -> str:
    """Markdown of a script whose docstring starts with the page's title.

    A block of comment lines at the left margin becomes a paragraph; everything between two such
    blocks becomes one fenced code block.
    """
    docstring, _, body = source.removeprefix('"""').partition('"""')
    title, _, lead = docstring.strip().partition("\n")
    parts = [f"# {title.rstrip('.')}", lead.strip()]
    for block in re.split(r"^((?:# ?.*\n)+)", body, flags=re.MULTILINE):
        if block.startswith("#"):
            parts.append(re.sub(r"^# ?", "", block, flags=re.MULTILINE).strip())
        elif block.strip():
            parts.append(f"```python\n{block.strip()}\n```")
    return "\n\n".join(part for part in parts if part) + "\n"
