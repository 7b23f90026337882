"""The report as one HTML file without external resources."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.reporting.figures import ReportFigure
from megatron.reporting.tables import DAGGER, Row, Table, latex
from megatron.utils.templates import templates


@dataclass(frozen=True)
class Chapter:
    """A section of the page: a heading, tables, figures and a list of notes. anchor: its id."""

    anchor: str
    title: str
    lead: str = ""
    tables: Sequence[Table] = ()
    figures: Sequence[ReportFigure] = ()
    notes: Sequence[str] = ()

    @property
    def empty(self) -> bool:
        return not (self.tables or self.figures or self.notes)


def render_page(title: str, chapters: Sequence[Chapter]) -> str:
    """The complete document, without empty chapters. The template escapes all text."""
    environment = templates("megatron.reporting")
    environment.filters["latex"] = latex
    environment.filters["base64"] = lambda content: base64.b64encode(content).decode("ascii")
    environment.tests["row"] = lambda line: isinstance(line, Row)
    return environment.get_template("report.html.j2").render(
        title=title,
        chapters=[chapter for chapter in chapters if not chapter.empty],
        dagger=DAGGER,
    )
