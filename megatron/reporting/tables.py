"""The tables of all reports: their contents, and Markdown and LaTeX (booktabs) output."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

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
    ">": r"$>$",
    "|": r"$|$",
    # After `\\`, LaTeX would read these as its arguments.
    "[": "{[}",
    "]": "{]}",
    "*": "{*}",
}


@dataclass(frozen=True)
class Cell:
    """best: printed bold. worse than the reference method, significantly: printed with a dagger."""

    text: str
    best: bool = False
    worse: bool = False


@dataclass(frozen=True)
class Row:
    """A label per label column, a cell per value column.

    published: values of a paper, printed in italics.
    """

    labels: tuple[str, ...]
    cells: tuple[Cell, ...]
    published: bool = False


@dataclass(frozen=True)
class Section:
    """A heading across the table."""

    title: str


@dataclass(frozen=True)
class Table:
    """A table with label columns on the left and value columns on the right.

    Attributes:
        name: file name without extension.
        label_columns: headers of the label columns.
        columns: headers of the value columns.
        notes: sentences printed below the table.
        file_only: its values are in another table of the page, so it is only written as a file.
    """

    name: str
    title: str
    label_columns: tuple[str, ...]
    columns: tuple[str, ...]
    lines: tuple[Row | Section, ...]
    notes: tuple[str, ...] = ()
    file_only: bool = False

    @property
    def headers(self) -> tuple[str, ...]:
        return (*self.label_columns, *self.columns)

    @property
    def rows(self) -> list[Row]:
        return [line for line in self.lines if isinstance(line, Row)]


def markdown(table: Table, heading: str = "##") -> str:
    """Heading, table and a list of the notes. Best values are bold, published rows in italics."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    lines = [f"{heading} {escape_markdown(table.title)}", ""]
    lines.append(line(list(map(escape_markdown, table.headers))))
    lines.append(line([":--"] * len(table.label_columns) + ["--:"] * len(table.columns)))
    for entry in table.lines:
        # The title of a section is in the first column.
        if isinstance(entry, Section):
            title = f"**{escape_markdown(entry.title)}**"
            lines.append(line([title] + [""] * (len(table.headers) - 1)))
            continue
        texts = list(map(escape_markdown, entry.labels))
        for cell in entry.cells:
            text = cell.text
            if cell.best:
                text = f"**{text}**"
            if cell.worse:
                text += f" {DAGGER}"
            texts.append(text)
        if entry.published:
            texts = [text and f"*{text}*" for text in texts]
        lines.append(line(texts))
    if table.notes:
        lines.append("")
    for note in table.notes:
        lines.append(f"- {escape_markdown(note)}")
    return "\n".join(lines) + "\n"


def latex(table: Table) -> str:
    """A compact `table` environment for a document that uses booktabs: small type, narrow columns,
    and deviations in the smallest type.
    """

    def line(cells: Sequence[str]) -> str:
        return f"{' & '.join(cells)} \\\\"

    # The head. The notes are in the caption, as LaTeX tables have no footnotes.
    title = rf"\textbf{{{escape_latex(table.title)}.}}"
    caption = " ".join([title, *map(escape_latex, table.notes)])
    alignment = "l" * len(table.label_columns) + "r" * len(table.columns)
    lines = [
        r"\begin{table}",
        r"\centering\footnotesize",
        r"\setlength{\tabcolsep}{3pt}",
        rf"\caption{{{caption}}}",
        rf"\label{{tab:{table.name}}}",
        rf"\begin{{tabular}}{{{alignment}}}",
        r"\toprule",
        line(list(map(escape_latex, table.headers))),
        r"\midrule",
    ]

    # A rule before each section but the first.
    for entry in table.lines:
        if isinstance(entry, Section):
            if lines[-1] != r"\midrule":
                lines.append(r"\midrule")
            title = rf"\textit{{{escape_latex(entry.title)}}}"
            lines.append(rf"\multicolumn{{{len(table.headers)}}}{{l}}{{{title}}} \\")
            continue

        # Cells: bold if best, the deviation small, a dagger if worse.
        texts = list(map(escape_latex, entry.labels))
        for cell in entry.cells:
            text, _, deviation = map(escape_latex, cell.text.partition(" ± "))
            text = re.sub(r"^-(?=\d)", "$-$", text)  # a minus sign instead of a hyphen
            if cell.best:
                text = rf"\textbf{{{text}}}"
            if deviation:
                text += rf"{{\tiny$\pm${deviation}}}"
            if cell.worse:
                text += _LATEX[DAGGER]
            texts.append(text)
        if entry.published:
            texts = [text and rf"{{\itshape {text}}}" for text in texts]
        lines.append(line(texts))
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


def escape_latex(text: str) -> str:
    return re.sub("|".join(map(re.escape, _LATEX)), lambda match: _LATEX[match[0]], text)


def escape_markdown(text: str) -> str:
    """Escapes the characters that Markdown would read as markup: emphasis, code, links, tables,
    tags, entities and math. Underscores inside words (`kerple_log`) are not markup, so they are
    kept.
    """
    markup = r"[\\`*|\[\]$]|<(?=[A-Za-z/!?])|&(?=#?\w+;)|~(?=~)|(?<!\w)_(?=\S)"
    return re.sub(markup, r"\\\g<0>", text)
