"""The pages in docs/results, from the records in `records/`.

    README.md                   claims, main figure and table
    pilot.md                    the runs that selected the settings
    modes.md                    methods in all inference modes
    tables.md, *.png            all tables and figures

    records/NAME/SEED/results.jsonl  the records of the sweep NAME; those of `pilot*` are in pilot.md, of `modes*` in
                                     modes.md; `training-length` has losses on more tokens
    records/step_times.json          written by benchmarks/train_step.py --json (optional)

The block between the two markers in the README of the project is replaced too.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure
from scipy.stats import t as t_distribution

from experiments.replication.claims import (
    claims,
    claims_table,
    evaluate_claims,
    has_several_runs,
)
from experiments.replication.experiment import check_comparable, environments, rank, setting_facts, settings_of
from experiments.replication.findings import comparisons_of_log, decided_claims, verdict_summary
from experiments.replication.training_length import LOG, at_training_length, held_out_table, pilot_table, seed_table
from megatron.evaluation.records import RESULTS, Record, read_results
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
)
from megatron.reporting.checkpoint_figures import effective_length_plot
from megatron.reporting.differences import DIFFERENCE_NOTE, Key, PairedLosses, seed_label
from megatron.reporting.figures import perplexity_measurements, perplexity_plot
from megatron.reporting.formatting import NOT_MEASURED, best_texts, format_mean, slug
from megatron.reporting.modes import mode_effects, mode_figures, mode_tables, unsupported_notes
from megatron.reporting.paper_tables import difference_tables, missing_notes, perplexity_tables, resolution_tables
from megatron.reporting.positions import Curves, curve_of, position_plot
from megatron.reporting.published import corpus_name, display_name, line_numbers, published
from megatron.reporting.speed import benchmark_tables, read_benchmarks
from megatron.reporting.style import (
    GRAY,
    SCREEN,
    SMALL,
    Style,
    legend_above,
    length_ticks,
    line_style,
    mark_train_length,
    new_figure,
    panel_title,
    render,
    seeds,
    seeds_caption,
)
from megatron.reporting.tables import Cell, Row, Section, Table, markdown
from megatron.utils.errors import UserError
from megatron.utils.files import write_atomically

RECORDS, STEP_TIMES = Path(__file__).with_name("records"), "step_times.json"
PILOT, MODES, TRAINING_LENGTH = "pilot", "modes", "training-length"  # folders of records start with these
START, END = "<!-- results: written by experiments/replication/generate.py -->", "<!-- end of results -->"
MAX_BYTES = 1_500_000  # of a file in the repository
MAIN_METHODS = (*published("kerple-3").methods, Method("kerple_power_ap_ap"))
# KERPLE's Figure 5 has these lines, and rotary, which is far above them.
POSITION_METHODS = (Method("kerple_log"), Method("alibi"), Method("rpe"))
RUNS_NOTE = (
    "Means over different numbers of seeds cannot be compared, because seeds differ more than many methods. In tables "
    "of means over seeds, values without ± have one seed. Tables of differences compare the seeds that both methods "
    "have, and their ± is the standard error over documents, also of one seed."
)
MIN_PIXELS = 1200  # of the width of a figure
MAX_LENGTHS = 6  # columns of the main table


def add_results(folder: Path, records: Path = RECORDS) -> None:
    """Copy the records in a sweep's folder (or any other) to NAME/SEED/results.jsonl in `records`, where NAME is the
    name of the folder, with losses by document and position rounded to 5 digits. Raises UserError if there are none.
    """
    contents: dict[Path, bytes] = {}
    for record in read_results(folder):
        path = records / folder.resolve().name / str(record["seed"]) / RESULTS
        line = json.dumps(_compact(record), separators=(",", ":"))
        contents[path] = contents.get(path, b"") + f"{line}\n".encode()
    for path, content in contents.items():
        if len(content) > MAX_BYTES:
            raise UserError(f"{path}: {len(content):,} bytes are more than {MAX_BYTES:,}; split the sweep")
    for path, content in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)


def _compact(record: Record) -> dict[str, object]:
    values = cast(dict[str, Any], {**record})
    if values.get("groups"):
        values["groups"] = {**values["groups"], "losses": _rounded(values["groups"]["losses"])}
    if values["kind"] == "positions":
        values["losses"] = _rounded(values["losses"])
    path = (values["checkpoint"] or {}).get("path")
    if path and Path(path).is_absolute():
        values["checkpoint"] = {**values["checkpoint"], "path": os.path.relpath(path)}
    return values


def _rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


def write_pages(pages: Path, records: Path = RECORDS) -> list[Path]:
    """Write the texts and figures, and return their paths. Raises UserError."""
    contents = {path: text.encode() for path, text in texts(pages, records).items()} | figures(pages, records)
    pages.mkdir(parents=True, exist_ok=True)
    for path, content in contents.items():
        write_atomically(path, content)
    return list(contents)


def texts(pages: Path, folder: Path = RECORDS) -> dict[Path, str]:
    """The content of every page by path."""
    records = _read(folder)
    times, time_tables = _step_times(folder / STEP_TIMES)
    results = evaluate_claims(records, times)
    tables = [table for table in perplexity_tables(records) if table.name.startswith("perplexity")]
    tables += [*difference_tables(records), *mode_table(records), *resolution_tables(records), *time_tables]
    held_out = at_training_length(read_results(_folders(folder, TRAINING_LENGTH)))
    seeds_of_methods = seed_table(records)
    tables[:0] = [table for table in (held_out_table(held_out), seeds_of_methods) if table]
    spread = seeds_caption(len({record["seed"] for record in records}))
    values = {
        "claims": _without_heading(claims_table(results)),
        "summary": verdict_summary(results),
        "decided": decided_claims(results),
        "comparisons": comparisons_of_log(results),
        "several_runs": has_several_runs(results),
        "main": _without_heading(table) if (table := main_table(records)) else "",
        "few_seeds": few_seeds(records),
        "other_corpora": [corpus_name(setting.corpus) for setting in other_methods(_perplexities(records)[0]).settings],
        "held_out": setting_facts(held_out),
        "seed_table": seeds_of_methods is not None,
        "kerple_claims": (count := sum(claim.paper == "KERPLE" for claim in claims())),
        "needed": [float(t_distribution.isf(ALPHA / 2 / count, df)) for df in (2, 6)],
        "spread": f".{spread}" if spread else ", one seed.",
        "settings": setting_facts(records),
        "environments": environments(records),
    }
    contents = {
        pages / "README.md": _render("results.md.j2", **values),
        pages / "tables.md": f"# Tables\n\n{RUNS_NOTE}\n\n" + "\n".join(markdown(table) for table in tables),
        pages / "pilot.md": _render("pilot.md.j2", **_pilot(folder)),
        pages / "modes.md": _render("modes.md.j2", **_modes(folder)),
    }
    readme = pages.resolve().parents[1] / "README.md"
    if readme.is_file() and START in (text := readme.read_text(encoding="utf-8")):
        before, _, rest = text.partition(START)
        block = _render("results_block.md.j2", **values)
        contents[readme] = f"{before}{START}\n{block}{END}{rest.partition(END)[2]}"
    return contents


def figures(pages: Path, folder: Path = RECORDS) -> dict[Path, bytes]:
    """The PNG files by path."""
    records = _read(folder)
    drawings: dict[str, tuple[Callable[[Style], Figure], Style]] = {}
    pos_embs = list(dict.fromkeys(method_of(record).pos_emb for record in records))
    numbers = line_numbers({display_name(Method(pos_emb)): pos_emb for pos_emb in pos_embs})
    if settings := settings_of(records):
        perplexities, errors = _perplexities(records)
        main = perplexities.select(settings, MAIN_METHODS)
        drawings["main"] = partial(main_plot, main), _wide(len(main.settings))
        for name, group in (("perplexity", main), ("other-methods", other_methods(perplexities))):
            if group.methods:
                draw = partial(
                    perplexity_plot, group, errors, name=lambda name: display_name(Method(name)), pos_embs=pos_embs
                )
                drawings[name] = draw, SCREEN
    for length in sorted({record["length"] for record in records if record["kind"] == "positions"}):
        if curves := position_differences(records, length):
            draw = partial(
                position_plot,
                curves,
                length,
                settings[0].train_length,
                pos_embs=pos_embs,
                label="loss minus log with a window (nats)",
            )
            drawings[f"positions-{length}"] = draw, _wide(len(curves))
    for setting in settings:
        lengths: dict[str, list[int]] = {}
        for record in sorted(records, key=_order):
            own = record["kind"] == "effective_length" and record["corpus"] == setting.corpus
            if own and method_of(record) in MAIN_METHODS and record["effective_lengths"]:
                heads = lengths.setdefault(display_name(method_of(record)), [])
                heads += [length for layer in record["effective_lengths"] for length in layer]
        if lengths:
            limit = max(record["length"] for record in records if record["kind"] == "effective_length")
            draw = partial(effective_length_plot, lengths, limit, numbers=numbers)
            drawings[slug("effective-lengths", setting.corpus)] = draw, SCREEN
    for figure in mode_figures(read_results(_folders(folder, MODES))):
        drawings[figure.name] = figure.draw, _wide(2)
    return {pages / f"{name}.png": render(draw, style) for name, (draw, style) in drawings.items()}


# -- tables -----------------------------------------------------------------------------------------------------------


def main_table(records: Sequence[AnyRecord]) -> Table | None:
    """Perplexity of the methods of KERPLE's Table 3 and bias+wht: at all lengths of a single corpus, or at 1, 8 and 64
    times the training length of each of several.
    """
    values = measurements(records, "extrapolation", "perplexity")
    settings = settings_of(records)
    methods = [method for method in MAIN_METHODS if method in values.methods]
    columns, cells = [], []
    for setting in settings:
        for length in _main_lengths(values, records, setting):
            columns.append(f"{corpus_name(setting.corpus)}, {length:,}" if len(settings) > 1 else f"{length:,}")
            column = [values.values(setting, method, length) for method in methods]
            texts = [NOT_MEASURED if cell is None else format_mean(cell) for cell in column]
            bold = best_texts(comparable_means(column), texts, "lowest")
            cells.append([Cell(text, best=best) for text, best in zip(texts, bold, strict=True)])
    if not cells:
        return None
    rows = zip(methods, zip(*cells, strict=True), strict=True)
    lines = tuple(Row((display_name(method),), tuple(row)) for method, row in rows)
    notes = missing_notes(values.select(settings), {method: display_name(method) for method in methods})
    return Table("main", "Perplexity", ("method",), tuple(columns), lines, tuple(notes))


def _main_lengths(values: Measurements, records: Sequence[AnyRecord], setting: Setting) -> list[int]:
    """The lengths of a corpus in the main table."""
    lengths = values.select([setting]).lengths
    if len(settings_of(records)) > 1 or len(lengths) > MAX_LENGTHS:
        return [length for length in lengths if length in (setting.train_length or 0) * np.array((1, 8, 64))]
    return lengths


def few_seeds(records: Sequence[AnyRecord]) -> str:
    """A sentence on the methods of the main table that have other seeds than the method with most seeds, at all lengths
    shown; empty if there are none.
    """
    values, texts = measurements(records, "extrapolation", "perplexity"), []
    for setting in settings_of(records):
        own: dict[Method, set[int]] = {}
        for method in MAIN_METHODS:
            cells = [values.values(setting, method, length) for length in _main_lengths(values, records, setting)]
            known = [set(cell.dropna().index) for cell in cells if cell is not None]
            if known:
                own[method] = set.intersection(*known)
        most = max(own.values(), key=len, default=set())
        for method in (method for method in own if own[method] != most):
            found = ", ".join(map(str, sorted(own[method])))
            which = f"only seed{'s' * (len(own[method]) > 1)} {found}" if found else "no seed"
            texts.append(f"{display_name(method)} on {corpus_name(setting.corpus)} has {which}")
    return f" {'; '.join(texts)}: compare such means by their paired differences." if texts else ""


def mode_table(records: Sequence[AnyRecord]) -> list[Table]:
    """The loss with a window or in blocks minus that in mode full; no table if there are no such modes."""
    losses = PairedLosses(records)
    keys = {(setting_of(record), method_of(record), record["length"]) for record in records if record.get("groups")}
    columns = sorted({(method.mode, length) for _, method, length in keys if method.mode != "full"})
    rows: dict[tuple[Setting, Method], list[tuple[Key, Key]]] = {}
    for setting in settings_of(records):
        methods = {method.pos_emb for key, method, _ in keys if key == setting and method.mode != "full"}
        for method in published("kerple-3").ordered(Method(pos_emb) for pos_emb in sorted(methods)):
            rows[setting, method] = [
                ((setting, replace(method, mode=mode), length), (setting, method, length)) for mode, length in columns
            ]
    counts = {key: losses.seeds(pairs) for key, pairs in rows.items()}
    lines: list[Row | Section] = []
    for (setting, method), pairs in rows.items():
        if (section := Section(corpus_name(setting.corpus))) not in lines:
            lines.append(section)
        name = display_name(method) + seed_label(counts[setting, method], max(counts.values()))
        lines.append(Row((name,), tuple(Cell(losses.text(*pair)) for pair in pairs)))
    headers = tuple(f"{mode}, {length}" for mode, length in columns)
    title = "Loss with a window or in blocks minus that with all keys"
    return [Table("modes", title, ("method",), headers, tuple(lines), (DIFFERENCE_NOTE,))] if lines else []


def _pilot(folder: Path) -> dict[str, object]:
    """The settings of the pilots by their losses at the training length."""
    records: list[AnyRecord] = []
    for pilot in _folders(folder, PILOT):
        found: list[AnyRecord] = [*read_results(pilot)]
        records += [record for record in found if (record["kind"], record["mode"]) == ("extrapolation", "full")]
    table = pilot_table(records)
    if table is None:
        return {"table": "", "environments": []}
    facts = {
        "tokens": max(record["tokens"] for record in records),
        "steps": max((record["checkpoint"] or {}).get("iteration") or 0 for record in records),
    }
    return {"table": _without_heading(table), "environments": environments(records), **facts}


def _wide(panels: int) -> Style:
    """The style of figures with one panel per corpus, side by side."""
    width = min(9.5, 2.3 + 2.4 * panels)
    return Style(width=width, size=10.0, dpi=max(160, math.ceil(MIN_PIXELS / width)))


# -- figures ----------------------------------------------------------------------------------------------------------


def main_plot(perplexities: Measurements, style: Style = SCREEN) -> Figure:
    """Perplexity by length, a panel per corpus that contains the lines of all methods whose perplexity does not rise by
    more than half from the shortest to the longest length. Other lines leave the panels; a text names those that are
    completely above the panel.
    """
    columns = style.columns(len(perplexities.settings))
    figure, panels = new_figure(style, len(perplexities.settings), columns, sharex=True)
    numbers = line_numbers({display_name(method): method.pos_emb for method in MAIN_METHODS})
    handles: dict[str, Any] = {}
    for axes, setting in zip(panels, perplexities.settings, strict=True):
        curves = {method: perplexities.curve(setting, method) for method in perplexities.methods}
        curves = {method: curve for method, curve in curves.items() if len(curve)}
        above: list[str] = []
        stable = [mean for curve in curves.values() if (mean := curve["mean"]).iloc[-1] <= 1.5 * mean.iloc[0]]
        lowest = min(curve["mean"].min() for curve in curves.values())
        high = max((mean.max() for mean in stable), default=lowest)
        inside = (curve for curve in curves.values() if curve["mean"].min() <= high)
        low = min((curve["mean"] - curve["std"].fillna(0)).min() for curve in inside)
        axes.set_ylim(low - 0.1 * (high - low) - 0.01 * low, high + 0.15 * (high - low) + 0.01 * low)
        length_ticks(axes, style, perplexities.lengths, columns)
        if setting.train_length is not None:
            mark_train_length(axes, style, setting.train_length, label=False)  # lines would cross the label
        for method, curve in curves.items():
            label = display_name(method)
            looks = line_style(style, numbers[label])
            if curve["mean"].min() > axes.get_ylim()[1]:
                above.append(label)
                continue
            (handles[label],) = axes.plot(curve.index, curve["mean"], label=label, zorder=3, **looks)
            seeds(axes, style, perplexities.by_seed(setting, method), looks["color"])
        if above:
            axes.text(
                *(1, 1, f"above: {', '.join(above)}"),
                transform=axes.transAxes,
                ha="right",
                va="top",
                fontsize=SMALL * style.size,
                color=GRAY,
            )
        panel_title(axes, style, columns, corpus_name(setting.corpus))
    figure.supxlabel("sequence length (tokens); dashed: training length")
    figure.supylabel("perplexity")
    names = [name for method in MAIN_METHODS if (name := display_name(method)) in handles]
    legend_above(figure, style, [handles[name] for name in names])
    return figure


def position_differences(records: Iterable[AnyRecord], length: int) -> dict[str, Curves]:
    """For each corpus, the loss by position minus that of log with a window of the training length."""
    losses: dict[Setting, dict[Method, dict[int | None, AnyRecord]]] = {}
    for record in records:
        if record["kind"] == "positions" and record["length"] == length and record["losses"]:
            by_method = losses.setdefault(setting_of(record), {})
            by_method.setdefault(method_of(record), {})[record["seed"]] = record
    result: dict[str, Curves] = {}
    for setting in sorted(losses, key=rank):
        by_method = losses[setting]
        window = by_method.get(Method(LOG.pos_emb, f"window@{setting.train_length}"), {})
        curves = {method: curve_of(by_method[method], window) for method in POSITION_METHODS if method in by_method}
        if any(curve.shape[1] for curve in curves.values()):
            result[corpus_name(setting.corpus)] = {method: c for method, c in curves.items() if c.shape[1]}
    return result


def _perplexities(records: Iterable[AnyRecord]) -> tuple[Measurements, Measurements]:
    """The perplexities with full attention and their standard errors, in the order of the figures."""
    return perplexity_measurements(sorted((record for record in records if record["mode"] == "full"), key=_order))


def other_methods(perplexities: Measurements) -> Measurements:
    """Log and the methods that the main figure does not have, on the corpora on which such methods were measured."""
    others = [method for method in perplexities.methods if method not in MAIN_METHODS]
    with_others = [setting for setting, method in perplexities.lines if method in others]
    return perplexities.select(with_others, [LOG, *others])


# -- records ----------------------------------------------------------------------------------------------------------


def _read(folder: Path) -> list[AnyRecord]:
    """The records of all sweeps except those for pilot.md, modes.md and losses at the training length. Raises
    UserError if they are not comparable.
    """
    others = {other for prefix in (PILOT, MODES, TRAINING_LENGTH) for other in _folders(folder, prefix)}
    records: list[AnyRecord] = [*read_results(sorted({*_folders(folder, "")} - others))]
    check_comparable(records)
    return records


def _folders(folder: Path, prefix: str) -> list[Path]:
    """The folders of the sweeps whose names start with `prefix`."""
    folders = {path.parents[1] for path in folder.glob(f"*/*/{RESULTS}")}
    return sorted(path for path in folders if path.name.startswith(prefix))


def _modes(folder: Path) -> dict[str, object]:
    """The losses in each inference mode minus those in mode full."""
    records = read_results(_folders(folder, MODES))
    tables = mode_tables(records)
    return {
        "tables": [markdown(table) for table in tables],
        "comparisons": sum(len(table.lines) for table in tables),
        "figures": [(figure.caption, f"{figure.name}.png") for figure in mode_figures(records)],
        "effects": mode_effects(records),
        "notes": unsupported_notes(records),
        "environments": environments(records),
    }


def _order(record: AnyRecord) -> tuple[tuple[int, str], int]:
    """By corpus, then with the methods of KERPLE's Table 3 first."""
    method = Method(method_of(record).pos_emb)
    number = MAIN_METHODS.index(method) if method in MAIN_METHODS else len(MAIN_METHODS)
    return rank(setting_of(record)), number


def _step_times(path: Path) -> tuple[dict[str, list[float]], list[Table]]:
    """The seconds of every step by method, and the tables of the benchmark."""
    if not path.is_file():
        return {}, []
    methods = next(iter(read_benchmarks(path)["tables"].values()), [])
    return {row["name"]: row.get("seconds", []) for row in methods}, benchmark_tables(path)[:1]


def _render(template: str, **values: object) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=False,  # Markdown; the tables are escaped
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    return environment.get_template(template).render(**values)


def _without_heading(table: Table) -> str:
    return markdown(table).partition("\n\n")[2]
