"""Tables in the layout of the KERPLE, DAPE and LEX papers, with the papers' values below comparable
ones.

KERPLE's tables have one row per length and one column per method; DAPE's, LEX's and the passkey
tables one row per method and one column per length. All have one section per corpus (the passkey
tables: per depth). Methods that the paper does not have come last.

The table `perplexity` is narrower: all methods as rows, lengths as columns, and a section per
corpus and mode.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from megatron.reporting.aggregate import (
    ALPHA,
    AnyRecord,
    Measurements,
    Method,
    Setting,
    comparable_means,
    measurements,
    method_of,
    setting_of,
    significantly_better,
)
from megatron.reporting.differences import PairedLosses
from megatron.reporting.formatting import (
    NOT_AVAILABLE,
    NOT_MEASURED,
    best_texts,
    format_mean,
    format_percent,
    slug,
)
from megatron.reporting.published import (
    Published,
    corpus_name,
    corpus_sort_key,
    display_name,
    load_published,
)
from megatron.reporting.tables import DAGGER, Cell, Row, Section, Table

REFERENCE = Method("kerple_log")
NEGATIVE = "the attention resolution of a seed is negative and has no meaning"


def perplexity_tables(
    records: Iterable[AnyRecord], reference: Method = REFERENCE, *, papers: bool = True
) -> list[Table]:
    """All perplexity tables that the records fill, per model size, training length and protocol.

    First the table of all methods and modes. Then, with `papers`, for mode `full`, with protocol
    `last-k` DAPE's table, with other protocols KERPLE's Tables 3, 5 and 6; and LEX's two tables if
    there are results of xPos or of blockwise attention. These are `file_only` without values of the
    paper.
    """
    tables = []
    for table in _perplexity_tables(records, reference, papers=papers):
        repeats = table.name.partition("-")[0] != "perplexity" and not any(
            row.published for row in table.rows
        )
        tables.append(replace(table, file_only=repeats))
    return tables


def _perplexity_tables(
    records: Iterable[AnyRecord], reference: Method, *, papers: bool
) -> list[Table]:
    tables = []
    for group in _groups(measurements(records, "extrapolation", "perplexity")):
        tables.append(_table("kerple-3", group, group.methods, reference, rows="modes"))
        if not papers:
            continue
        full = [method for method in group.methods if method.mode == "full"]
        if group.settings[0].protocol.startswith("last-k"):
            tables += [_table("dape", group, full, reference, rows="methods")] if full else []
            continue
        # Table 3 has all methods that Tables 5 and 6 do not have.
        methods: dict[str, list[Method]] = {"kerple-3": [], "kerple-5": [], "kerple-6": []}
        table_of = {
            kind.pos_emb: name
            for name in ("kerple-5", "kerple-6")
            for kind in load_published(name).methods
        }
        for method in full:
            methods[table_of.get(method.pos_emb, "kerple-3")].append(method)
        for name in methods:
            if methods[name]:
                tables.append(_table(name, group, methods[name], reference, rows="lengths"))
        if any(
            method.pos_emb == "xpos" or method.mode.startswith("blockwise")
            for method in group.methods
        ):
            compared = full + [
                method for method in group.methods if method.mode.startswith("blockwise")
            ]
            tables.append(_table("lex", group, compared, reference, rows="methods"))
            several_modes = {method.pos_emb for method in group.methods if method.mode != "full"}
            compared = [method for method in group.methods if method.pos_emb in several_modes]
            if compared:
                tables.append(_table("lex-modes", group, compared, reference, rows="methods"))
    return tables


def difference_tables(records: Sequence[AnyRecord], reference: Method = REFERENCE) -> list[Table]:
    """Paired differences of the loss from that of the reference method in the same mode, per
    setting. Settings without such differences have no table.
    """
    losses, tables = PairedLosses(records), []
    values = measurements(records, "extrapolation", "loss")
    for setting in sorted(values.settings, key=lambda setting: corpus_sort_key(setting.corpus)):
        group = values.select([setting])
        rows = []
        for method in load_published("kerple-3").ordered(group.methods):
            compared = Method(reference.pos_emb, method.mode)
            if method == compared:
                continue
            pairs = [
                ((setting, method, length), (setting, compared, length)) for length in group.lengths
            ]
            if any(losses.difference(*pair) for pair in pairs):
                rows.append(((display_name(method),), pairs))
        if rows:
            title = f"Loss minus that of {display_name(reference)}, {setting_title(setting)}"
            tables.append(
                Table(
                    slug("differences", setting.name).lower(),
                    f"{title}, protocol {setting.protocol}",
                    ("Method",),
                    tuple(f"{length:,}" for length in group.lengths),
                    losses.rows(rows),
                    (losses.note(rows),),
                )
            )
    return tables


def resolution_tables(records: Iterable[AnyRecord]) -> list[Table]:
    """LEX's table of attention resolutions, per model size and training length. A negative one has
    no meaning, so the mean over seeds that include one is not shown.
    """
    resolutions = [record for record in records if record["kind"] == "resolution"]
    negative = {
        _resolution_cell(record) for record in resolutions if (record.get("resolution") or 0) < 0
    }
    shown = []
    for record in resolutions:
        hidden = (
            {"resolution": None, "note": NEGATIVE} if _resolution_cell(record) in negative else {}
        )
        shown.append({**record, **hidden})
    groups = _groups(measurements(shown, "resolution", "resolution"))
    return [
        _table("lex-resolution", group, group.methods, None, rows="methods", best="highest")
        for group in groups
    ]


def _resolution_cell(record: AnyRecord) -> tuple[Setting, Method, int]:
    return setting_of(record), method_of(record), record["length"]


def passkey_tables(records: Iterable[AnyRecord]) -> list[Table]:
    """Passkey accuracies per corpus, model size and training length: a section per depth, and one
    for their mean.
    """
    accuracies = measurements(records, "passkey", "accuracy")
    tables = []
    for setting in accuracies.settings:
        group = accuracies.select([setting])
        methods, lengths = load_published("kerple-3").ordered(group.methods), group.lengths
        depths = sorted(group.frame["depth"].unique())
        sections = {
            f"Depth {depth:g}": Measurements(group.frame[group.frame["depth"] == depth])
            for depth in depths
        }
        if len(depths) > 1:
            sections = {"Mean over depths": group.over_depths(), **sections}
        lines: list[Row | Section] = []
        for title, section in sections.items():
            lines.append(Section(title))
            for method in methods:
                cells = []
                for length in lengths:
                    values = section.values(setting, method, length)
                    cells.append(Cell(NOT_MEASURED if values is None else format_percent(values)))
                lines.append(Row((display_name(method),), tuple(cells)))
        notes = [
            "Share of prompts answered with the complete pass key.",
            *_seeds_note(group, is_bold=False),
        ]
        notes += missing_notes(group, {method: display_name(method) for method in methods})
        table = Table(
            slug("passkey", setting.corpus or "text", setting.size, setting.train_length).lower(),
            f"Passkey retrieval, {setting_title(setting)}",
            ("Method",),
            tuple(f"{length:,}" for length in lengths),
            tuple(lines),
            tuple(notes),
        )
        tables.append(table)
    return tables


def setting_title(setting: Setting) -> str:
    """Corpus, model size and training length, for titles."""
    trained = f"trained at length {setting.train_length:,}" if setting.train_length else ""
    model = f"{setting.model[0]} layers of {setting.model[1]}" if setting.model else ""
    return ", ".join(filter(None, (corpus_name(setting.corpus), model, trained)))


def missing_notes(values: Measurements, names: Mapping[Method, str]) -> list[str]:
    """For each of these methods with missing values, at which lengths they are missing and the
    reasons.
    """
    missing = values.frame[values.frame["value"].isna()].fillna(
        {"note": "the value overflows a float"}
    )
    notes = []
    for method, name in names.items():
        rows = missing[missing["method"] == method]
        if len(rows):
            lengths = ", ".join(f"{length:,}" for length in sorted(rows["length"].unique()))
            notes.append(
                f"{NOT_AVAILABLE}: {name} at {lengths}: {'; '.join(rows['note'].unique())}."
            )
    return notes


def _groups(values: Measurements) -> list[Measurements]:
    """One group per model size, training length and protocol: the settings in a group differ only
    in the corpus.
    """
    groups: dict[tuple[object, ...], list[Setting]] = {}
    for setting in values.settings:
        groups.setdefault((setting.model, setting.train_length, setting.protocol), []).append(
            setting
        )
    return [values.select(settings) for settings in groups.values()]


def _table(
    name: str,
    group: Measurements,
    methods: Sequence[Method],
    reference: Method | None,
    *,
    rows: Literal["lengths", "methods", "modes"],
    best: Literal["lowest", "highest"] = "lowest",
) -> Table:
    """A table of these methods in the layout of the published table `name`.

    Args:
        reference: see `_cells`.
        rows: what the rows are. `modes`: the methods, with a section per mode and without the
            published values.
    """
    # Methods in the order of the paper.
    paper = load_published(name)
    methods = paper.ordered(methods)
    shown = group.select(group.settings, methods)

    # The paper's names are only clear next to its values.
    name_of = (
        paper.name if any(map(paper.matches, group.settings)) and rows != "modes" else display_name
    )
    names = {method: name_of(method) for method in methods}

    # A section per setting, or per mode.
    lines: list[Row | Section] = []
    for title, setting, section_methods in _sections(shown, methods, by_mode=rows == "modes"):
        lines.append(Section(title))
        lengths = shown.select([setting]).lengths if rows == "lengths" else shown.lengths

        # Cells by length, then a row per length or per method.
        grid = [
            _cells(group, setting, section_methods, length, reference, best) for length in lengths
        ]
        papers = [_paper_cells(paper, setting, section_methods, length) for length in lengths]
        labels = [f"{length:,}" for length in lengths]
        if rows != "lengths":
            grid = list(map(list, zip(*grid, strict=True)))
            papers = list(map(list, zip(*papers, strict=True)))
            labels = [names[method] for method in section_methods]
            if rows == "modes" and compares_modes(section_methods):
                labels = [method.mode for method in section_methods]
            elif rows == "modes":
                labels = [name_of(replace(method, mode="full")) for method in section_methods]

        # The paper's row follows ours.
        for label, cells, paper_cells in zip(labels, grid, papers, strict=True):
            lines.append(Row((label,), tuple(cells)))
            if (
                rows != "modes"
                and paper.matches(setting)
                and any(cell.text for cell in paper_cells)
            ):
                lines.append(Row((f"{label}, paper",), tuple(paper_cells), published=True))

    # Where the layout comes from, and what the values are.
    common = group.settings[0]
    label_column = {"lengths": "Length", "methods": "Method", "modes": "Method"}[rows]
    if rows == "modes" and compares_modes(shown.methods):
        label_column = "Mode"
    notes = [] if rows == "modes" else [f"Layout: {paper.source}."]
    return Table(
        name=slug(
            "perplexity" if rows == "modes" else name,
            common.size,
            common.train_length,
            common.protocol,
        ).lower(),
        title=_title(paper, common),
        label_columns=(label_column,),
        columns=tuple(
            names.values() if rows == "lengths" else (f"{length:,}" for length in shown.lengths)
        ),
        lines=tuple(lines),
        notes=(*notes, *_notes(paper, shown, names, lines, reference, best)),
    )


def compares_modes(methods: Sequence[Method]) -> bool:
    """Whether there are several modes of a single method."""
    return (
        len({method.pos_emb for method in methods}) == 1 < len({method.mode for method in methods})
    )


def _sections(
    values: Measurements, methods: Sequence[Method], *, by_mode: bool
) -> Iterator[tuple[str, Setting, Sequence[Method]]]:
    """(title, setting, methods) of the sections: one per corpus. by_mode: one per corpus and mode,
    with the methods that have a value on this corpus; the modes of a single method are in one
    section.
    """
    modes = sorted({method.mode for method in methods}, key=lambda mode: (mode != "full", mode))
    for setting in sorted(values.settings, key=lambda setting: corpus_sort_key(setting.corpus)):
        title = corpus_name(setting.corpus)
        if not by_mode:
            yield title, setting, methods
            continue
        if compares_modes(methods):
            measured = [method for method in methods if (setting, method) in values.lines]
            measured.sort(key=lambda method: modes.index(method.mode))
            yield f"{title}, {display_name(Method(methods[0].pos_emb))}", setting, measured
            continue
        for mode in modes:
            measured = [
                method
                for method in methods
                if method.mode == mode and (setting, method) in values.lines
            ]
            if measured:
                yield title + (f", {mode}" if len(modes) > 1 else ""), setting, measured


def _title(paper: Published, setting: Setting) -> str:
    """The paper's title, and what the corpora have in common."""
    parts = [
        paper.title,
        f"{setting.model[0]} layers of {setting.model[1]}" if setting.model else "",
    ]
    parts.append(
        f"trained at length {setting.train_length:,}"
        if setting.train_length
        else "training length unknown"
    )
    parts.append(f"protocol {setting.protocol}" if setting.protocol else "")
    return ", ".join(filter(None, parts))


def _paper_cells(
    paper: Published, setting: Setting, methods: Sequence[Method], length: int
) -> list[Cell]:
    """One cell per method with the paper's value; empty if the paper has none."""
    texts = [paper.value(setting.corpus, method, length) or "" for method in methods]
    return [Cell(text.removesuffix(DAGGER).rstrip(), worse=text.endswith(DAGGER)) for text in texts]


def _cells(
    group: Measurements,
    setting: Setting,
    methods: Sequence[Method],
    length: int,
    reference: Method | None,
    best: Literal["lowest", "highest"],
) -> list[Cell]:
    """One cell per method. Marks the best values (see `best_texts`), and as `worse` the methods
    that are significantly worse than the reference method in the same mode.
    """
    values = [group.values(setting, method, length) for method in methods]
    texts = []
    for cell in values:
        texts.append(NOT_MEASURED if cell is None else format_mean(cell))
    bold = best_texts(comparable_means(values), texts, best)
    cells = []
    for method, cell, text, is_best in zip(methods, values, texts, bold, strict=True):
        ours = (
            group.values(setting, replace(reference, mode=method.mode), length)
            if reference
            else None
        )
        worse = (
            cell is not None
            and ours is not None
            and ours is not cell
            and significantly_better(ours, cell)
        )
        cells.append(Cell(text, best=is_best, worse=worse))
    return cells


def _notes(
    paper: Published,
    group: Measurements,
    names: Mapping[Method, str],
    lines: Sequence[Row | Section],
    reference: Method | None,
    best: Literal["lowest", "highest"],
) -> list[str]:
    # How values were aggregated and marked, and on how many tokens they were measured.
    rows = [line for line in lines if isinstance(line, Row)]
    notes = _seeds_note(group)
    if any(cell.best for row in rows for cell in row.cells):
        notes.append(f"Bold: {best} value, and values that are printed the same.")
    tokens = group.frame[group.frame["tokens"].fillna(0) > 0]
    if len(tokens):
        fewest, most = tokens["tokens"].min(), tokens["tokens"].max()
        notes.append(
            f"Scored tokens: {fewest:,.0f}" + (f" to {most:,.0f}." if fewest < most else ".")
        )
    for (setting, length), cell in tokens.groupby(["setting", "length"], sort=False):
        if cell["tokens"].nunique() > 1 or cell["targets"].nunique() > 1:
            counts = " or ".join(f"{count:,.0f}" for count in sorted(cell["tokens"].unique()))
            notes.append(
                f"{corpus_name(setting.corpus)} at {length:,}: the values are not comparable, "
                f"because they were measured on different texts ({counts} tokens)."
            )

    # The daggers, and the rows of the paper.
    if reference and any(cell.worse for row in rows for cell in row.cells):
        notes.append(
            f"{DAGGER}: {display_name(reference)} is significantly better (paired two-sided t-test "
            f"over the seeds, in the same mode, α = {ALPHA:g}, not corrected for the number of "
            "comparisons)."
        )
    if any(row.published for row in rows):
        if any(cell.worse for row in rows if row.published for cell in row.cells):
            notes.append(f"In the paper's rows, {DAGGER} is copied from the paper.")
        notes.append(
            f'Rows labeled "paper": {paper.source}' + (f"; {paper.note}." if paper.note else ".")
        )
    return notes + missing_notes(group, names)


def _seeds_note(values: Measurements, *, is_bold: bool = True) -> list[str]:
    if values.num_seeds < 2:
        return []
    if values.seeds.nunique() == 1:
        return [f"Mean ± standard deviation over {values.num_seeds} seeds."]
    bold = "; methods with fewer than others are not bold" if is_bold else ""
    return [f"Mean ± standard deviation over up to {values.num_seeds} seeds{bold}."]
