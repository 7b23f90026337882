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
from operator import attrgetter
from typing import Literal

from megatron.evaluation.protocols import Kerple
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
from megatron.reporting.differences import Key, PairedLosses
from megatron.reporting.formatting import (
    NOT_AVAILABLE,
    best_texts,
    format_length,
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
    for group in _groups(measurements(records, "extrapolation", "perplexity")):
        tables.append(_table("kerple-3", group, group.methods, reference, by_mode=True))
        if not papers:
            continue
        for name, methods in _paper_layouts(group).items():
            if methods:
                table = _table(name, group, methods, reference)
                has_paper = any(row.published for row in table.rows)
                tables.append(replace(table, file_only=not has_paper))
    return tables


def _paper_layouts(group: Measurements) -> dict[str, list[Method]]:
    """The published tables whose layouts fit, and the methods of each."""
    full = [method for method in group.methods if method.mode == "full"]
    if group.settings[0].protocol.startswith("last-k"):
        return {"dape": full}

    # Table 3 has all methods that Tables 5 and 6 do not have.
    layouts: dict[str, list[Method]] = {"kerple-3": [], "kerple-5": [], "kerple-6": []}
    table_of: dict[str, str] = {}
    for name in ("kerple-5", "kerple-6"):
        table_of |= {kind.pos_emb: name for kind in load_published(name).methods}
    for method in full:
        layouts[table_of.get(method.pos_emb, "kerple-3")].append(method)

    # LEX compares xPos and blockwise attention, and methods in several modes.
    blockwise = [method for method in group.methods if method.mode.startswith("blockwise")]
    if blockwise or "xpos" in {method.pos_emb for method in group.methods}:
        layouts["lex"] = full + blockwise
        with_modes = {method.pos_emb for method in group.methods if method.mode != "full"}
        layouts["lex-modes"] = [method for method in group.methods if method.pos_emb in with_modes]
    return layouts


def difference_tables(records: Sequence[AnyRecord], reference: Method = REFERENCE) -> list[Table]:
    """Paired differences of the loss from that of the reference method in the same mode, per
    setting. Settings without such differences have no table.
    """
    losses = PairedLosses(records)
    tables = []
    values = measurements(records, "extrapolation", "loss")
    for setting in _by_corpus(values):
        # A row per method other than the reference, with a pair of cells per length.
        group = values.select([setting])
        rows = []
        for method in load_published("kerple-3").ordered(group.methods):
            compared = Method(reference.pos_emb, method.mode)
            pairs = []
            for length in group.lengths:
                pairs.append(((setting, method, length), (setting, compared, length)))
            if method != compared and any(losses.difference(*pair) for pair in pairs):
                rows.append(((display_name(method),), pairs))
        if rows:
            title = f"Loss minus that of {display_name(reference)}, {setting_title(setting)}"
            table = Table(
                slug("differences", setting.name).lower(),
                f"{title}, protocol {setting.protocol}",
                ("Method",),
                tuple(map(format_length, group.lengths)),
                losses.rows(rows),
                (losses.note(rows), *settings_notes(group)),
            )
            tables.append(table)
    return tables


def resolution_tables(records: Iterable[AnyRecord]) -> list[Table]:
    """LEX's table of attention resolutions, per model size and training length. A negative one has
    no meaning, so the mean over seeds that include one is not shown.
    """
    # The records of each cell of the table, a record per seed.
    cells: dict[Key, list[AnyRecord]] = {}
    for record in records:
        if record["kind"] == "resolution":
            key = setting_of(record), method_of(record), record["length"]
            cells.setdefault(key, []).append(record)

    # A cell with a negative value has none.
    shown = []
    for cell in cells.values():
        if any((record.get("resolution") or 0) < 0 for record in cell):
            cell = [{**record, "resolution": None, "note": NEGATIVE} for record in cell]
        shown += cell
    groups = _groups(measurements(shown, "resolution", "resolution"))
    return [_table("lex-resolution", group, group.methods) for group in groups]


def passkey_tables(records: Iterable[AnyRecord]) -> list[Table]:
    """Passkey accuracies: a section per depth, and one for their mean."""
    accuracies = measurements(records, "passkey", "accuracy")
    tables = []
    for setting in accuracies.settings:
        group = accuracies.select([setting])
        methods = load_published("kerple-3").ordered(group.methods)
        names = {method: display_name(method) for method in methods}

        # A section per depth, and the mean first.
        sections = {}
        depths = sorted(group.frame["depth"].unique())
        if len(depths) > 1:
            sections["Mean over depths"] = group.over_depths()
        for depth in depths:
            rows = group.frame["depth"] == depth
            sections[f"Depth {depth:g}"] = Measurements(group.frame[rows])

        # A row per method, with a cell per length.
        lines: list[Row | Section] = []
        for title, section in sections.items():
            lines.append(Section(title))
            for method, name in names.items():
                cells = []
                for length in group.lengths:
                    values = section.values(setting, method, length)
                    cells.append(Cell(format_percent(values)))
                lines.append(Row((name,), tuple(cells)))
        notes = ["Share of prompts answered with the complete pass key."]
        notes += _seeds_note(group, is_bold=False) + settings_notes(group)
        notes += missing_notes(group, names)
        table = Table(
            slug("passkey", setting.corpus or "text", setting.size, setting.train_length).lower(),
            f"Passkey retrieval, {setting_title(setting)}",
            ("Method",),
            tuple(map(format_length, group.lengths)),
            tuple(lines),
            tuple(notes),
        )
        tables.append(table)
    return tables


def setting_title(setting: Setting) -> str:
    """Corpus, model size and training length, for titles."""
    parts = [corpus_name(setting.corpus)]
    if setting.model:
        parts.append("{} layers of {}".format(*setting.model))
    if setting.train_length:
        parts.append(f"trained at length {setting.train_length:,}")
    return ", ".join(parts)


def missing_notes(values: Measurements, names: Mapping[Method, str]) -> list[str]:
    """For each method without some values, the lengths at which they are missing, and why."""
    missing = values.frame[values.frame["value"].isna()]
    missing = missing.fillna({"note": "the value overflows a float"})
    notes = []
    for method, name in names.items():
        rows = missing[missing["method"] == method]
        if len(rows):
            lengths = ", ".join(map(format_length, sorted(rows["length"].unique())))
            reasons = "; ".join(rows["note"].unique())
            notes.append(f"{NOT_AVAILABLE}: {name} at {lengths}: {reasons}.")
    return notes


def _by_corpus(values: Measurements) -> list[Setting]:
    """The settings in the papers' order of their corpora."""
    return sorted(values.settings, key=lambda setting: corpus_sort_key(setting.corpus))


def _groups(values: Measurements) -> list[Measurements]:
    """The settings of a group differ only in the corpus."""
    groups: dict[tuple[object, ...], list[Setting]] = {}
    for setting in values.settings:
        common = setting.model, setting.train_length, setting.protocol
        groups.setdefault(common, []).append(setting)
    return [values.select(settings) for settings in groups.values()]


def _table(
    name: str,
    group: Measurements,
    methods: Sequence[Method],
    reference: Method | None = None,
    *,
    by_mode: bool = False,
) -> Table:
    """A table of these methods in the layout of the published table `name`.

    Args:
        reference: methods that are significantly worse than it in the same mode are marked.
        by_mode: a section per mode, methods as rows, and without the published values.
    """
    # Methods in the order of the paper. KERPLE's tables have a row per length.
    paper = load_published(name)
    methods = paper.ordered(methods)
    shown = group.select(group.settings, methods)
    by_length = name.startswith("kerple") and not by_mode
    best: Literal["lowest", "highest"] = "highest" if name == "lex-resolution" else "lowest"

    # The paper's names are only clear next to its values.
    with_paper = not by_mode and any(map(paper.matches, group.settings))
    names = {method: display_name(method) for method in methods}
    if with_paper:
        names = {method: paper.name(method) for method in methods}

    # A section per setting, or per mode.
    lines: list[Row | Section] = []
    for title, setting, section_methods in _sections(shown, methods, by_mode=by_mode):
        lines.append(Section(title))
        lengths = shown.lengths
        if by_length:
            lengths = shown.select([setting]).lengths

        # Cells by length: ours, with the best in bold, and the paper's.
        grid, papers = [], []
        for length in lengths:
            values = [group.values(setting, method, length) for method in section_methods]
            texts = list(map(format_mean, values))
            bold = best_texts(comparable_means(values), texts, best)
            cells, paper_cells = [], []
            for method, value, text, is_best in zip(
                section_methods, values, texts, bold, strict=True
            ):
                worse = False
                if reference and value is not None:
                    base = group.values(setting, replace(reference, mode=method.mode), length)
                    is_other = base is not None and base is not value
                    worse = is_other and significantly_better(base, value)
                cells.append(Cell(text, is_best, worse))
                text = paper.value(setting.corpus, method, length) or ""
                dagger = text.endswith(DAGGER)
                paper_cells.append(Cell(text.removesuffix(DAGGER).rstrip(), worse=dagger))
            grid.append(cells)
            papers.append(paper_cells)

        # A row per length or per method.
        labels = list(map(format_length, lengths))
        if not by_length:
            grid = list(map(list, zip(*grid, strict=True)))
            papers = list(map(list, zip(*papers, strict=True)))
            labels = [names[method] for method in section_methods]
        if by_mode:
            labels = [display_name(Method(method.pos_emb)) for method in section_methods]
            if compares_modes(section_methods):
                labels = [method.mode for method in section_methods]

        # The paper's row follows ours.
        for label, cells, paper_cells in zip(labels, grid, papers, strict=True):
            lines.append(Row((label,), tuple(cells)))
            has_values = any(cell.text for cell in paper_cells)
            if with_paper and has_values and paper.matches(setting):
                lines.append(Row((f"{label}, paper",), tuple(paper_cells), published=True))

    # The paper's title, and what the corpora have in common.
    common = group.settings[0]
    parts = [paper.title]
    if common.model:
        parts.append("{} layers of {}".format(*common.model))
    trained = "training length unknown"
    if common.train_length:
        trained = f"trained at length {common.train_length:,}"
    parts.append(trained)
    if common.protocol:
        parts.append(f"protocol {common.protocol}")

    # Names of the file and the columns. The table of all modes has no layout of a paper.
    label_column, columns = "Method", tuple(map(format_length, shown.lengths))
    notes = [f"Layout: {paper.source}."]
    if by_length:
        label_column, columns = "Length", tuple(names.values())
    elif by_mode:
        name = "perplexity"
        notes = []
        if compares_modes(shown.methods):
            label_column = "Mode"
    return Table(
        name=slug(name, common.size, common.train_length, common.protocol).lower(),
        title=", ".join(parts),
        label_columns=(label_column,),
        columns=columns,
        lines=tuple(lines),
        notes=(*notes, *_notes(paper, shown, names, lines, reference, best)),
    )


def compares_modes(methods: Sequence[Method]) -> bool:
    """Whether there are several modes of a single method."""
    pos_embs = {method.pos_emb for method in methods}
    return len(pos_embs) == 1 < len(modes_of(methods))


def modes_of(methods: Iterable[Method]) -> list[str]:
    """The modes of the methods: `full`, then the others by name."""
    return sorted({method.mode for method in methods}, key=lambda mode: (mode != "full", mode))


def _sections(
    values: Measurements, methods: Sequence[Method], *, by_mode: bool
) -> Iterator[tuple[str, Setting, Sequence[Method]]]:
    """(title, setting, methods) of the sections: one per corpus. by_mode: one per corpus and mode,
    with the methods that have a value on this corpus; the modes of a single method are in one
    section.
    """
    modes = modes_of(methods)
    for setting in _by_corpus(values):
        title = corpus_name(setting.corpus)
        measured = set(values.select([setting]).methods)
        ours = [method for method in methods if method in measured]
        if not by_mode:
            yield title, setting, methods
        elif compares_modes(methods):
            ours.sort(key=lambda method: modes.index(method.mode))
            yield f"{title}, {display_name(Method(methods[0].pos_emb))}", setting, ours
        elif len(modes) == 1:
            yield title, setting, ours
        else:
            for mode in modes:
                of_mode = [method for method in ours if method.mode == mode]
                if of_mode:
                    yield f"{title}, {mode}", setting, of_mode


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
    cells = [cell for row in rows for cell in row.cells]
    notes = _seeds_note(group)
    if any(cell.best for cell in cells):
        notes.append(f"Bold: {best} value, and values that are printed the same.")
    tokens = group.frame[group.frame["tokens"].fillna(0) > 0]
    if len(tokens):
        bounds = tokens["tokens"].min(), tokens["tokens"].max()
        texts = dict.fromkeys(f"{bound:,.0f}" for bound in bounds)
        notes.append(f"Scored tokens: {' to '.join(texts)}.")
    measured = group.frame.dropna(subset="value")
    for (setting, length), cell in measured.groupby(["setting", "length"], sort=False):
        if cell["tokens"].nunique() > 1 or cell["targets"].nunique() > 1:
            counts = [f"{count:,.0f}" for count in sorted(cell["tokens"].dropna().unique())]
            size = f" ({' or '.join(counts)} tokens)" if counts else ""
            notes.append(
                f"{corpus_name(setting.corpus)} at {length:,}: the values are not comparable, "
                f"because they were measured on different texts{size}."
            )
    notes += lengths_notes(group) + settings_notes(group)

    # The daggers, and the rows of the paper.
    if reference and any(cell.worse for cell in cells):
        notes.append(
            f"{DAGGER}: {display_name(reference)} is significantly better (paired two-sided t-test "
            f"over the seeds, in the same mode, α = {ALPHA:g}, not corrected for the number of "
            "comparisons)."
        )
    published = [row for row in rows if row.published]
    if any(cell.worse for row in published for cell in row.cells):
        notes.append(f"In the paper's rows, {DAGGER} is copied from the paper.")
    if published:
        notes.append(
            f'Rows labeled "paper": {"; ".join(filter(None, (paper.source, paper.note)))}.'
        )
    return notes + missing_notes(group, names)


def lengths_notes(values: Measurements) -> list[str]:
    """The corpora on which the lengths of a method were measured on different texts, e.g. because
    an earlier evaluation had other lengths. The protocol `kerple` does so itself.
    """
    notes = {}
    measured = values.frame[values.frame["tokens"].fillna(0) > 0]
    by_seed = measured.groupby(["setting", "method", "seed"], sort=False, dropna=False)
    for (setting, *_), rows in by_seed:
        if setting.protocol.startswith(Kerple.base_name):
            continue
        if rows["tokens"].nunique() > 1 or rows["targets"].nunique() > 1:
            notes[setting] = (
                f"{corpus_name(setting.corpus)}: values at different lengths are not comparable, "
                "because they were measured on different texts; evaluate all of them in one run, "
                "with lengths that divide the longest."
            )
    return list(notes.values())


def settings_notes(values: Measurements) -> list[str]:
    """The trainings, the prompts, the precisions, and the tokens put before texts, of values that
    were not measured alike; and the models that may have been trained on the text.
    """
    notes = []
    for setting, rows in values.frame.dropna(subset="value").groupby("setting", sort=False):
        title = corpus_name(setting.corpus)
        # Models of Hugging Face have iteration 0.
        steps = sorted(rows.loc[rows["iteration"] > 0, "iteration"].unique())
        if len(steps) > 1:
            numbers = ", ".join(f"{int(step):,}" for step in steps)
            notes.append(
                f"{title}: the models were trained for different numbers of steps ({numbers})."
            )
        for pos_emb, own in rows.groupby(rows["method"].map(attrgetter("pos_emb")), sort=False):
            name = display_name(Method(pos_emb))
            if own["recipe"].nunique() > 1:
                notes.append(
                    f"{title}: {name}: the checkpoints differ in more than their seed, such as "
                    "their learning rate, batch size or data; to show them apart, evaluate them "
                    "with --label."
                )
            for text in own["trained_text"].dropna().unique():
                notes.append(f"{title}: {name} may have been trained on the text: {text}.")
        trials = sorted(rows["trials"].dropna().unique())
        if len(trials) > 1:
            numbers = " and ".join(f"{int(number):,}" for number in trials)
            notes.append(f"{title}: the values are of different numbers of prompts ({numbers}).")
        precisions = sorted(rows["precision"].dropna().unique())
        if len(precisions) > 1:
            notes.append(
                f"{title}: the values were measured in different precisions "
                f"({' and '.join(precisions)})."
            )
        first_tokens = rows["bos"].astype("Int64").drop_duplicates()
        if len(first_tokens) > 1:
            texts = first_tokens.astype("string").fillna("none")
            notes.append(
                f"{title}: the values are not comparable, because different tokens were put before "
                f"the texts (--bos): {' and '.join(sorted(texts))}."
            )
    return notes


def _seeds_note(values: Measurements, *, is_bold: bool = True) -> list[str]:
    if values.num_seeds < 2:
        return []
    note = f"Mean ± standard deviation over {values.num_seeds} seeds."
    if values.seeds.nunique() > 1:
        note = f"Mean ± standard deviation over up to {values.num_seeds} seeds."
        if is_bold:
            note = f"{note[:-1]}; methods with fewer than others are not bold."
    return [note]
