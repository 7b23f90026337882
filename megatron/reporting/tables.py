"""Tables 3, 5 and 6 of KERPLE, DAPE's and LEX's, from stored results, in the papers' layout and beside their numbers.

KERPLE: a row per length, a column per method, a section per corpus. DAPE and LEX: a row per method, a column per
length. No list of methods is closed: what no paper has takes its `pos-emb` as its name and comes last.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.reporting.layout import NOT_AVAILABLE, NOT_MEASURED, Cell, PaperTable, Row, Section, written
from megatron.reporting.published import Published, published
from megatron.reporting.results import Measurements, Method, Setting, in_order, kind_of, measurements, slug
from megatron.reporting.statistics import ALPHA, significantly_better

REFERENCE: Method = ("kerple_log", "full")
CORPORA = {"openwebtext2": "OpenWebText2", "github": "GitHub", "arxiv": "ArXiv", "pg22": "PG22", "books3": "Books3"}


def perplexity_tables(records: Sequence[Mapping[str, Any]], reference: Method = REFERENCE) -> list[PaperTable]:
    """Every table of perplexities that the records fill, for each size of model, training length and protocol."""
    found = measurements(records, "extrapolation", "perplexity")
    tables: list[PaperTable] = []
    for settings in _groups(found.values):
        group = _Group(found, settings, reference)
        if settings[0].protocol.startswith("last-k"):
            tables.append(group.by_method("dape", found.methods(settings)))
            continue
        tables += _kerple(group, found.methods(settings)) + _lex(group, found.methods(settings))
    return [table for table in tables if table.lines]


def resolution_tables(records: Sequence[Mapping[str, Any]], value: str = "resolution") -> list[PaperTable]:
    """LEX's table of attention resolutions, for each size of model and training length."""
    found = measurements(records, "resolution", value)
    tables = []
    for settings in _groups(found.values):
        group = _Group(found, settings, REFERENCE, best=max)
        tables.append(group.by_method("lex-resolution", found.methods(settings)))
    return tables


def _groups(settings: Mapping[Setting, Any]) -> list[list[Setting]]:
    """Settings that differ in the corpus alone, corpora in the papers' order."""
    places = {corpus: place for place, corpus in enumerate(CORPORA)}
    groups: dict[tuple, list[Setting]] = {}
    for setting in sorted(settings, key=lambda one: places.get(one.corpus.lower(), len(places))):
        groups.setdefault((setting.model, setting.train_length, setting.protocol), []).append(setting)
    return list(groups.values())


def _kerple(group: "_Group", methods: Sequence[Method]) -> list[PaperTable]:
    """Table 3 with every method that the others do not have, then Tables 5 and 6."""
    special = {kind[0]: name for name in ("kerple-5", "kerple-6") for kind in published(name).methods}
    shares: dict[str, list[Method]] = {"kerple-3": [], "kerple-5": [], "kerple-6": []}
    for method in methods:
        shares[special.get(method[0], "kerple-3")].append(method)
    return [group.by_length(name, share) for name, share in shares.items() if share]


def _lex(group: "_Group", methods: Sequence[Method]) -> list[PaperTable]:
    """LEX's two tables, where its method or its inference mode is among the results."""
    if not any(pos_emb == "xpos" or mode.startswith("blockwise") for pos_emb, mode in methods):
        return []
    shown = [method for method in methods if kind_of(method)[1] in ("full", "blockwise")]
    several = [pos_emb for pos_emb, mode in methods if mode != "full"]
    modes = [method for method in methods if method[0] in several]
    return [group.by_method("lex", shown)] + ([group.by_method("lex-modes", modes)] if modes else [])


class _Group:
    """The measurements of one size of model, training length and protocol, one setting per corpus."""

    def __init__(
        self, found: Measurements, settings: Sequence[Setting], reference: Method, best: Callable[..., Any] = min
    ):
        self.found = found
        self.settings = settings
        self.reference = reference
        self.best = best

    def by_length(self, name: str, methods: Sequence[Method]) -> PaperTable:
        """KERPLE's layout: lengths down, methods across."""
        paper = published(name)
        methods = in_order(methods, paper.methods)
        lines: list[Row | Section] = []
        for setting in self.settings:
            lines.append(Section(_corpus(setting)))
            for length in self.found.lengths([setting]):
                cells = [self._cell(setting, method, length) for method in methods]
                lines.append(Row(f"{length}", self._marked(cells, setting, [(m, length) for m in methods])))
                lines += self._paper_row(paper, setting, [(method, length) for method in methods], f"{length}, paper")
        columns = tuple(paper.name(method) for method in methods)
        return self._table(name, paper, "Extrp.", columns, lines, methods)

    def by_method(self, name: str, methods: Sequence[Method]) -> PaperTable:
        """DAPE's and LEX's layout: methods down, lengths across."""
        paper = published(name)
        methods = in_order(methods, paper.methods)
        lengths = self.found.lengths(self.settings)
        lines: list[Row | Section] = []
        for setting in self.settings:
            lines.append(Section(_corpus(setting)))
            grid = {}
            for length in lengths:
                places = [(method, length) for method in methods]
                column = self._marked([self._cell(setting, *place) for place in places], setting, places)
                grid |= dict(zip(places, column, strict=True))
            for method in methods:
                lines.append(Row(paper.name(method), tuple(grid[method, length] for length in lengths)))
                places = [(method, length) for length in lengths]
                lines += self._paper_row(paper, setting, places, f"{paper.name(method)}, paper")
        return self._table(name, paper, "Method", tuple(f"{length}" for length in lengths), lines, methods)

    def _cell(self, setting: Setting, method: Method, length: int) -> Cell:
        values = self.found.of(setting, method, length)
        if not self.found.tried(setting, method, length):
            return Cell(NOT_MEASURED)
        ours = self.found.of(setting, self.reference, length)
        worse = self.best is min and method != self.reference and significantly_better(ours, values)
        return Cell(written(list(values.values())), worse=worse)

    def _marked(
        self, cells: Sequence[Cell], setting: Setting, places: Sequence[tuple[Method, int]]
    ) -> tuple[Cell, ...]:
        """The cells with the best one marked, if there are two to compare."""
        means = {}
        for index, place in enumerate(places):
            values = self.found.of(setting, *place).values()
            if values:
                means[index] = statistics.fmean(values)
        chosen = self.best(means, key=means.get) if len(means) > 1 else None
        return tuple(Cell(cell.text, best=index == chosen, worse=cell.worse) for index, cell in enumerate(cells))

    def _paper_row(
        self, paper: Published, setting: Setting, places: Sequence[tuple[Method, int]], stub: str
    ) -> list[Row]:
        """The published numbers of the same setting, if there are any."""
        if not paper.serves(setting):
            return []
        texts = [paper.value(setting.corpus, method, length) for method, length in places]
        return [Row(stub, tuple(_published_cell(text) for text in texts), published=True)] if any(texts) else []

    def _table(
        self,
        name: str,
        paper: Published,
        corner: str,
        columns: tuple[str, ...],
        lines: Sequence[Row | Section],
        methods: Sequence[Method],
    ) -> PaperTable:
        common = self.settings[0]
        trained = f"trained at length {common.train_length}" if common.train_length else "training length unknown"
        size = f"{common.model[0]} layers of {common.model[1]}, " if common.model else ""
        kind = f", protocol {common.protocol}" if common.protocol else ""
        return PaperTable(
            name=slug(name, common.size, common.train_length, common.protocol),
            title=f"{paper.title}, {size}{trained}{kind}",
            corner=corner,
            columns=columns,
            lines=tuple(lines),
            notes=tuple(self._notes(paper, lines, methods)),
        )

    def _notes(self, paper: Published, lines: Sequence[Row | Section], methods: Sequence[Method]) -> list[str]:
        rows = [line for line in lines if isinstance(line, Row)]
        notes = [f"In the layout of {paper.source}."]
        seeds = {
            seed
            for setting in self.settings
            for method in methods
            for length in self.found.lengths([setting])
            for seed in self.found.of(setting, method, length)
        }
        if len(seeds) > 1:
            notes.append(f"Mean ± standard deviation over {len(seeds)} seeds.")
        notes.append(f"Bold: the {'lowest' if self.best is min else 'highest'} value.")
        notes += self._texts()
        if any(cell.worse for row in rows for cell in row.cells):
            name = published("kerple-3").name(self.reference)
            notes.append(
                f"†: {name} is significantly better (paired two-sided t-test over the seeds, α = {ALPHA:g}); in the "
                "paper's rows, as the paper marks it."
            )
        if any(row.published for row in rows):
            notes.append(f"Rows marked paper: {paper.source}" + (f"; {paper.note}." if paper.note else "."))
        for method in methods:
            missing: dict[str, set[int]] = {}
            for (setting, name, length), reason in self.found.reasons.items():
                if name == method and setting in self.settings:
                    missing.setdefault(reason, set()).add(length)
            for reason, absent in missing.items():
                where = ", ".join(map(str, sorted(absent)))
                notes.append(f"{NOT_AVAILABLE}: {paper.name(method)} at {where}: {reason}.")
        return notes

    def _texts(self) -> list[str]:
        """How many tokens are scored, and where numbers side by side are of different texts."""
        counts = {place: count for place, count in self.found.tokens.items() if place[0] in self.settings}
        if not counts:
            return []
        low, high = (extreme(extreme(found) for found in counts.values()) for extreme in (min, max))
        notes = [f"{low:,} tokens are scored." if low == high else f"{low:,} to {high:,} tokens are scored."]
        for (setting, length), found in counts.items():
            if len(found) > 1:
                notes.append(
                    f"{_corpus(setting)} at {length}: not all are of the same text "
                    f"({' or '.join(f'{one:,}' for one in sorted(found))} tokens), so they do not compare."
                )
        return notes


def _published_cell(text: str | None) -> Cell:
    if text is None:
        return Cell("")
    return Cell(text.removesuffix("†").rstrip(), worse=text.endswith("†"))


def _corpus(setting: Setting) -> str:
    return CORPORA.get(setting.corpus.lower(), setting.corpus)
