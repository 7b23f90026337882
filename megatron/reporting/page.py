"""The report as one HTML file: tables, figures and where the numbers come from, with nothing fetched from anywhere."""

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.reporting.drawing import PaperFigure
from megatron.reporting.layout import PaperTable
from megatron.reporting.rendering import latex, markup

_STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --soft: #57606a; --line: #d5dae0; --page: #ffffff; --band: #f4f6f8;
  --accent: #0a58a8; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e8ec; --soft: #9da7b1; --line: #39424c; --page: #14181d;
  --band: #1d232a; --accent: #7db7f0; } }
* { box-sizing: border-box; }
html { scroll-behavior: smooth; -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem 1.25rem 4rem; background: var(--page); color: var(--text);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0.5rem 0 0.25rem; text-wrap: balance; }
h2 { font-size: 1.35rem; margin: 3rem 0 0.5rem; padding-top: 0.75rem; border-top: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 1.75rem 0 0.25rem; }
p.lead { color: var(--soft); margin: 0 0 1.25rem; max-width: 46rem; }
a { color: var(--accent); text-underline-offset: 0.15em; }
nav ul { list-style: none; margin: 0; padding: 0; display: flex; flex-wrap: wrap; gap: 0.35rem 1.1rem; }
figure { margin: 1.25rem 0 2.25rem; }
figcaption { color: var(--soft); font-size: 0.875rem; margin-top: 0.6rem; max-width: 52rem; }
.scroll { overflow-x: auto; -webkit-overflow-scrolling: touch; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.925rem; min-width: min(34rem, 100%);
  border-bottom: 2px solid var(--text); }
caption { text-align: left; font-weight: 650; padding: 0.25rem 0 0.6rem; font-size: 1rem; }
caption span { position: sticky; left: 0; display: inline-block; max-width: min(100%, 88vw); }
th, td { padding: 0.3rem 0.8rem; text-align: right; white-space: nowrap; font-weight: normal; }
thead th { border-top: 2px solid var(--text); border-bottom: 1px solid var(--text); font-weight: 600; }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--page); }
tr.section th { position: static; font-weight: 600; padding-top: 0.9rem; border-bottom: 1px solid var(--line);
  background: var(--page); }
tr.section th span { position: sticky; left: 0.8rem; }
tr.published th, tr.published td { color: var(--soft); font-style: italic; font-size: 0.825rem; padding-top: 0;
  padding-bottom: 0.45rem; }
td.best { font-weight: 700; }
sup { line-height: 0; font-weight: normal; }
img { display: block; max-width: 100%; height: auto; background: #ffffff; border-radius: 6px; }
details { margin-top: 0.6rem; font-size: 0.875rem; }
summary { cursor: pointer; color: var(--accent); }
pre { overflow-x: auto; background: var(--band); padding: 0.8rem 1rem; border-radius: 6px; font-size: 0.8rem; }
ul.sources { padding-left: 1.2rem; font-size: 0.9rem; overflow-wrap: anywhere; }
@media (max-width: 40rem) { body { padding: 1rem 0.9rem 3rem; } h1 { font-size: 1.5rem; }
  caption span { position: sticky; left: 0; display: inline-block; max-width: min(100%, 88vw); }
th, td { padding: 0.3rem 0.55rem; } }
@media print { nav, details { display: none; } figure { break-inside: avoid; } body { max-width: none; } }
"""

# A longer list is folded.
LIST_SHOWN = 8


@dataclass(frozen=True)
class Chapter:
    """One heading with its tables, figures and, last, a list of plain sentences."""

    anchor: str
    title: str
    lead: str = ""
    tables: Sequence[PaperTable] = ()
    figures: Sequence[PaperFigure] = ()
    sentences: Sequence[str] = field(default=())

    @property
    def empty(self) -> bool:
        return not (self.tables or self.figures or self.sentences)


def page(title: str, lead: str, chapters: Sequence[Chapter]) -> str:
    """The whole document. Chapters without content are left out."""
    kept = [chapter for chapter in chapters if not chapter.empty]
    links = "".join(f'<li><a href="#{chapter.anchor}">{html.escape(chapter.title)}</a></li>' for chapter in kept)
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<link rel="icon" href="data:,">',
        f"<title>{html.escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        "</head>",
        "<body>",
        f'<header><h1>{html.escape(title)}</h1><p class="lead">{html.escape(lead)}</p></header>',
        f'<nav aria-label="Contents"><ul>{links}</ul></nav>',
        "<main>",
        *(_chapter(chapter) for chapter in kept),
        "</main>",
        "</body>",
        "</html>",
    ]
    return "\n".join(parts) + "\n"


def _chapter(chapter: Chapter) -> str:
    parts = [f'<section id="{chapter.anchor}"><h2>{html.escape(chapter.title)}</h2>']
    if chapter.lead:
        parts.append(f'<p class="lead">{html.escape(chapter.lead)}</p>')
    for table in chapter.tables:
        parts += [markup(table), f"<details><summary>LaTeX</summary><pre>{html.escape(latex(table))}</pre></details>"]
    parts += [_figure(figure) for figure in chapter.figures]
    if chapter.sentences:
        items = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in chapter.sentences)
        shown = " open" if len(chapter.sentences) <= LIST_SHOWN else ""
        summary = f"<summary>{len(chapter.sentences)} entries</summary>"
        parts.append(f'<details{shown}>{summary}<ul class="sources">{items}</ul></details>')
    return "\n".join([*parts, "</section>"])


def _figure(figure: PaperFigure) -> str:
    width, height = figure.figure.get_size_inches()
    data = base64.b64encode(figure.png()).decode("ascii")
    # Sizes in CSS pixels, so that nothing moves while the page is read; the picture itself is finer.
    size = f'width="{round(96 * width)}" height="{round(96 * height)}"'
    return (
        f'<figure id="{figure.name}"><h3>{html.escape(figure.title)}</h3>'
        f'<img src="data:image/png;base64,{data}" alt="{html.escape(figure.description)}" {size}>'
        f"<figcaption>{html.escape(figure.caption)}</figcaption></figure>"
    )
