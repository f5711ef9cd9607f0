"""Links between the files of the repository, as links between the pages of the site.

Links in Markdown files work within the repository. On the site, some of their targets are pages
under another name, and some are not part of it: such a link becomes plain text.
"""

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

OUTSIDE = {
    "bench/README.md": "costs.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "DESIGN.md": "design.md",
    "README.md": "index.md",
}
"""Pages of the site made from files outside of docs/, by their path in the repository."""

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def examples() -> dict[str, str]:
    """The examples' pages by the path of their script."""
    scripts = sorted((ROOT / "examples").glob("[0-9]*.py"))
    return {f"examples/{script.name}": f"examples/{script.stem}.md" for script in scripts}


def site_path(path: str) -> str | None:
    """Where a file of the repository is found on the site; None where it is no part of it."""
    known = {**OUTSIDE, **examples(), "examples": "examples/index.md"}
    if path in known:
        return known[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else None


def rewritten(markdown: str, path: str) -> str:
    """The Markdown of the repository's file `path` with links that hold on the site."""
    here = site_path(path) or path

    def link(found: re.Match[str]) -> str:
        target, hash_, anchor = found[3].partition("#")
        if not target or ":" in target:
            return found[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        there = site_path(file)
        if there is None:
            return found[2] if (ROOT / file).exists() else found[0]
        relative = posixpath.relpath(there, posixpath.dirname(here) or ".")
        return f"{found[1]}[{found[2]}]({relative}{hash_}{anchor})"

    return LINK.sub(link, markdown)
