"""A self-contained HTML page: text, tables, and figures as inline SVG; no scripts, no network."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from sinkwise.reports.charts import svg
from sinkwise.storage.files import write_bytes


@dataclass(frozen=True)
class Figure:
    """A chart with its caption."""

    chart: Any
    caption: str = ""

    @property
    def svg(self) -> str:
        """The chart as an SVG element."""
        return svg(self.chart)


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading and its contents, in this order."""

    heading: str
    paragraphs: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    table: Sequence[Sequence[str]] = ()
    """The first row holds the headings."""
    after: Sequence[str] = ()
    """Paragraphs below the table."""
    code: str = ""


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page; all its text is escaped."""

    title: str
    lead: Sequence[str]
    sections: Sequence[Section]
    footer: str

    def html(self) -> str:
        """The page as one string."""
        from jinja2 import Environment, StrictUndefined

        source = files("sinkwise.reports").joinpath("page.html.j2").read_text(encoding="utf-8")
        environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
        return environment.from_string(source).render(page=self)

    def write(self, path: Path) -> None:
        """Write the page atomically. Raises InputError if that fails."""
        write_bytes(path, self.html().encode())
