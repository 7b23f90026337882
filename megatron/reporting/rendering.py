"""A table of a paper as Markdown, CSV, LaTeX (booktabs) and HTML."""

import csv
import html
import io
import re

from megatron.reporting.layout import Cell, PaperTable, Row, Section

DAGGER = "†"

_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "†": r"$^\dagger$",
    "α": r"$\alpha$",
    "–": "--",
    "≤": r"$\le$",
    "×": r"$\times$",
    "<": r"$<$",
}


def markdown(table: PaperTable) -> str:
    """A heading, the table, a list of notes. Rows of a paper are in italics, the best value is bold."""
    lines = [f"## {_plain(table.title)}", "", _pipes([_plain(text) for text in (table.corner, *table.columns)])]
    lines.append(_pipes([":--", *["--:"] * len(table.columns)]))
    for line in table.lines:
        if isinstance(line, Section):
            lines.append(_pipes([f"**{_plain(line.title)}**", *[""] * len(table.columns)]))
            continue
        cells = [_plain(line.stub), *(_marked(cell, "**", f" {DAGGER}") for cell in line.cells)]
        if line.published:
            cells = [f"*{cell}*" if cell else cell for cell in cells]
        lines.append(_pipes(cells))
    lines += ["", *(f"- {_plain(note)}" for note in table.notes)] if table.notes else []
    return "\n".join(lines) + "\n"


def comma_separated(table: PaperTable) -> str:
    """Without marks other than the dagger; the first columns are the section, the stub, and whether it is published."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["section", table.corner, "published", *table.columns])
    section = ""
    for line in table.lines:
        if isinstance(line, Section):
            section = line.title
        else:
            cells = (_marked(cell, "", f" {DAGGER}") for cell in line.cells)
            writer.writerow([section, line.stub, "yes" if line.published else "no", *cells])
    return stream.getvalue()


def latex(table: PaperTable) -> str:
    """A `table` environment for a document that uses booktabs."""
    columns = len(table.columns)
    caption = " ".join([rf"\textbf{{{escape(table.title)}.}}", *map(escape, table.notes)])
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{caption}}}",
        rf"\label{{tab:{table.name}}}",
        rf"\begin{{tabular}}{{l{'r' * columns}}}",
        r"\toprule",
        _ampersands([escape(text) for text in (table.corner, *table.columns)]),
        r"\midrule",
    ]
    for line in table.lines:
        if isinstance(line, Section):
            if lines[-1] != r"\midrule":
                lines.append(r"\midrule")
            lines += [rf"\multicolumn{{{columns + 1}}}{{l}}{{\textit{{{escape(line.title)}}}}} \\", r"\midrule"]
            continue
        lines.append(_ampersands(_latex_cells(line)))
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


def markup(table: PaperTable) -> str:
    """A `<figure>` with the table: caption, column and row headings with their scopes, sections as row groups."""
    width = len(table.columns) + 1
    heads = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in (table.corner, *table.columns))
    parts = [
        f'<figure class="table" id="{table.name}">',
        f'<div class="scroll" role="region" tabindex="0" aria-label="{html.escape(table.title)}"><table>',
        f"<caption><span>{html.escape(table.title)}</span></caption>",
        f"<thead><tr>{heads}</tr></thead>",
        "<tbody>",
    ]
    for line in table.lines:
        if isinstance(line, Section):
            if parts[-1] != "<tbody>":
                parts += ["</tbody>", "<tbody>"]
            heading = f'<th scope="rowgroup" colspan="{width}"><span>{html.escape(line.title)}</span></th>'
            parts.append(f'<tr class="section">{heading}</tr>')
            continue
        kind = ' class="published"' if line.published else ""
        cells = "".join(f"<td{_class(cell)}>{_markup_cell(cell)}</td>" for cell in line.cells)
        parts.append(f'<tr{kind}><th scope="row">{html.escape(line.stub)}</th>{cells}</tr>')
    parts += ["</tbody>", "</table></div>"]
    if table.notes:
        parts.append(f"<figcaption>{' '.join(html.escape(note) for note in table.notes)}</figcaption>")
    return "\n".join([*parts, "</figure>"])


def escape(text: str) -> str:
    """Plain text as LaTeX."""
    return re.sub("|".join(map(re.escape, _LATEX)), lambda found: _LATEX[found[0]], text)


def _marked(cell: Cell, strong: str, dagger: str) -> str:
    return f"{strong if cell.best else ''}{cell.text}{strong if cell.best else ''}{dagger if cell.worse else ''}"


def _latex_cells(row: Row) -> list[str]:
    cells = []
    for cell in row.cells:
        text = escape(cell.text)
        text = rf"\textbf{{{text}}}" if cell.best else text
        cells.append(text + (_LATEX[DAGGER] if cell.worse else ""))
    stub = escape(row.stub)
    if row.published:
        return [rf"{{\footnotesize\itshape {text}}}" if text else "" for text in (stub, *cells)]
    return [stub, *cells]


def _markup_cell(cell: Cell) -> str:
    text = html.escape(cell.text)
    text = f"<strong>{text}</strong>" if cell.best else text
    return text + (f"<sup>{DAGGER}</sup>" if cell.worse else "")


def _class(cell: Cell) -> str:
    return ' class="best"' if cell.best else ""


def _pipes(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _ampersands(cells: list[str]) -> str:
    return f"{' & '.join(cells)} \\\\"


def _plain(text: str) -> str:
    """Text in which Markdown sees no mark-up."""
    return re.sub(r"([*_|<])", r"\\\1", text)
