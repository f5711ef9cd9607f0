"""Pages that are made of files outside of docs/, and links that hold on the site."""

from typing import Any

from links import OUTSIDE, ROOT, examples, rewritten
from literate import page


def on_files(files: Any, config: Any) -> Any:
    """Add the pages; called by mkdocs once."""
    from mkdocs.structure.files import File

    for path, there in OUTSIDE.items():
        if path != "README.md":
            text = (ROOT / path).read_text(encoding="utf-8")
            files.append(File.generated(config, there, content=rewritten(text, path)))
    lines = ["# Examples", "", "Scripts to run and to change; each takes seconds on a CPU.", ""]
    for path, there in examples().items():
        source = (ROOT / path).read_text(encoding="utf-8")
        text = rewritten(page(source), path) + f"\nRun it: `python {path}`.\n"
        files.append(File.generated(config, there, content=text))
        title = text.partition("\n")[0].removeprefix("# ")
        lines.append(f"1. [{title}]({there.removeprefix('examples/')})")
    listing = "\n".join(lines) + "\n"
    files.append(File.generated(config, "examples/index.md", content=listing))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for every page before it is rendered."""
    if page.file.generated_by:
        return markdown
    return rewritten(markdown, f"docs/{page.file.src_uri}")
