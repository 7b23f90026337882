"""The HTML page: well-formed, escaped, without external resources."""

import re
from html.parser import HTMLParser

from megatron.reporting.figures import ReportFigure
from megatron.reporting.html import Chapter, render_page
from megatron.reporting.style import new_figure
from megatron.reporting.tables import Cell, Row, Section, Table

VOID_ELEMENTS = {"meta", "link", "img", "br"}


class Page(HTMLParser):
    """Checks that elements are closed in order; collects resources, ids, links and images."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.resources: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.images: list[dict] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag not in VOID_ELEMENTS:
            self.open.append(tag)
        self.resources += [
            values[name] for name in ("src", "href", "srcset", "data", "action") if values.get(name)
        ]
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values["href"]] if tag == "a" else []
        self.images += [values] if tag == "img" else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


NASTY = 'a "b" <script>alert(1)</script> & c'


def test_page():
    lines = (
        Section(NASTY),
        Row(("512",), (Cell("3.40 ± 0.20", best=True), Cell("3.90", worse=True))),
        Section("ArXiv"),
        Row((NASTY,), (Cell("3.40"), Cell(NASTY)), published=True),
    )
    table = Table("a-table", NASTY, (NASTY,), ("a", NASTY), lines, (NASTY, "Second."))
    report_figure = ReportFigure("a-figure", NASTY, NASTY, lambda style: new_figure(style)[0])
    chapters = [
        Chapter("first", NASTY, NASTY, tables=[table], figures=[report_figure]),
        Chapter("empty", "Nothing to see"),
        Chapter("notes", "Notes", notes=[NASTY] * 9),
    ]
    text = render_page(NASTY, chapters)
    assert text.startswith("<!DOCTYPE html>\n")
    page = Page(text)
    assert all(resource.startswith(("data:", "#")) for resource in page.resources)
    assert not re.search(
        r"https?://|//cdn|@import|url\(|<script", re.sub(r"base64,[^\"]*", "", text)
    )
    assert page.ids == ["first", "table-a-table", "figure-a-figure", "notes"]
    assert page.links == ["#first", "#notes"]
    (image,) = page.images
    assert image["src"].startswith("data:image/png;base64,iVBOR")
    assert image["alt"] == NASTY
    assert (
        '<th scope="row">512</th><td class="best"><strong>3.40 ± '
        "0.20</strong></td><td>3.90<sup>†</sup></td>" in text
    )
    assert '<tr class="published"><th scope="row">a &#34;b&#34;' in text
    assert text.count("<tbody>") == text.count("</tbody>") == 2
    assert "\\begin{tabular}" in text
    assert "<details><summary>9 entries</summary>" in text
    assert "prefers-color-scheme: dark" in text
    assert 'http-equiv="Content-Security-Policy" content="default-src \'none\';' in text
    assert "script-src" not in text
    assert 'name="viewport"' in text
