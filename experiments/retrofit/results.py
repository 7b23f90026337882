"""The tables and the figure of the retrofit experiment, from `records/`."""

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from pandas import DataFrame

from experiments.analysis import Comparison
from experiments.figures import set_ticks
from experiments.retrofit.run import FACTORS, MODELS, TRAINED, UNTRAINED
from experiments.retrofit.run import STEPS as ALL_STEPS
from megatron.reporting.style import Style, legend_above, new_figure

RECORDS = Path(__file__).with_name("records")
STEPS = 300  # of the comparisons
# Variants and steps: those of the model before and without training, then after it.
BEFORE = (("control", 0), *((variant, 0) for variant in UNTRAINED))
AFTER = tuple((variant, STEPS) for variant in TRAINED)
INITIAL = ("kerple_log", 0)  # added, and not trained yet
SHOWN = (1, 4, 16, 64)  # multiples of the training length in the table
TITLES = {"demo": "BPE tokens of Python, L = 128", "bytes": "bytes of C, L = 256"}
FAR = 16  # that of the comparisons
COLORS = (*(f"C{number}" for number in range(10)), "black", "gold")
NAMES = {
    "control": "nothing",
    "kerple_log": "KERPLE (log)",
    "kerple_log_frozen": "KERPLE (log), only its scalars trained",
    "alibi": "ALiBi",
    "rpe": "T5",
    "dape_kerple": "DAPE-KERPLE",
    "kerple_log_only": "KERPLE (log) in place of rotary",
    "yarn": "YaRN",
    "dynamic_ntk": "dynamic NTK",
    "sinks": "sinks",
    "window": "window of L",
}


def read_models() -> dict[str, DataFrame]:
    """The columns seed, variant, steps, length and loss of all records of each model in MODELS."""
    models = {}
    for model in MODELS:
        # A file per seed and variant.
        rows = []
        for path in sorted((RECORDS / model).glob("seed*/*.jsonl")):
            seed = int(path.parent.name.removeprefix("seed"))
            for line in path.read_text().splitlines():
                rows.append({"seed": seed, **json.loads(line)})
        if rows:
            models[model] = DataFrame(rows)
    return models


def at(losses: DataFrame, variant: str, steps: int, multiple: int) -> dict[int, float]:
    """Seed -> the loss of a variant at a multiple of the training length."""
    length = multiple * int(losses["length"].min())
    rows = losses[losses["length"] == length]
    rows = rows[rows["steps"] == steps]
    rows = rows[rows["variant"] == variant]
    return dict(zip(rows["seed"], rows["loss"], strict=True))


def means_at(
    losses: DataFrame, variant: str, steps: int, multiples: Sequence[int]
) -> list[float] | None:
    """The means over seeds at multiples of the training length; None without records."""
    values = [at(losses, variant, steps, multiple).values() for multiple in multiples]
    if not values[0]:
        return None
    return [statistics.fmean(each) for each in values]


def length_name(multiple: int) -> str:
    """L, 4 L, ..."""
    if multiple == 1:
        return "L"
    return f"{multiple} L"


def retrofit_table(losses: DataFrame) -> str:
    """Mean losses at multiples of the training length: of the model before, without training, with
    the initial kernel, and after STEPS more steps. Markdown.
    """
    heads = " | ".join(map(length_name, SHOWN))
    columns = " --: |" * len(SHOWN)
    lines = [f"| added | steps | seeds | {heads} |", f"| :-- | --: | --: |{columns}"]
    for variant, steps in (*BEFORE, INITIAL, *AFTER):
        means = means_at(losses, variant, steps, SHOWN)
        if means is not None:
            seeds = len(at(losses, variant, steps, 1))
            cells = " | ".join(f"{mean:.2f}" for mean in means)
            lines.append(f"| {NAMES[variant]} | {steps} | {seeds} | {cells} |")
    return "\n".join(lines)


def retrofit_steps(losses: DataFrame) -> str:
    """Mean losses at FAR times the training length by the number of steps. Markdown."""
    heads = " | ".join(f"{steps:,} steps" for steps in ALL_STEPS)
    columns = " --: |" * len(ALL_STEPS)
    lines = [f"| added, loss at {length_name(FAR)} | seeds | {heads} |", f"| :-- | --: |{columns}"]
    for variant in TRAINED:
        # A run records all numbers of steps at once.
        by_steps = [at(losses, variant, steps, FAR).values() for steps in ALL_STEPS]
        seeds = len(by_steps[0])
        if seeds:
            cells = " | ".join(f"{statistics.fmean(each):.2f}" for each in by_steps)
            lines.append(f"| {NAMES[variant]} | {seeds} | {cells} |")
    return "\n".join(lines)


def retrofit_differences(losses: DataFrame) -> str:
    """KERPLE (log) minus what it is compared with, paired by seed. Markdown."""
    lines = ["| KERPLE (log), 300 steps, minus | at | nats | 95 % interval |"]
    lines.append("| :-- | --: | --: | --: |")
    others = [("control", STEPS), *BEFORE[1:]]
    for (variant, steps), multiple in itertools.product(others, (1, FAR)):
        # Seeds that both have.
        mine = at(losses, "kerple_log", STEPS, multiple)
        theirs = at(losses, variant, steps, multiple)
        differences = [mine[seed] - theirs[seed] for seed in mine.keys() & theirs.keys()]
        if differences:
            place = length_name(multiple)
            mean = statistics.fmean(differences)
            lines.append(f"| {NAMES[variant]} | {place} | {mean:+.3f} | {interval(differences)} |")
    return "\n".join(lines)


def interval(differences: Sequence[float]) -> str:
    """Student's 95 % interval of the mean; a dash for one difference."""
    if len(differences) < 2:
        return "–"
    low, high = Comparison(tuple(differences), documents=0.0, paper=0.0).interval
    return f"[{low:+.3f}, {high:+.3f}]"


def retrofit_plot(models: Mapping[str, DataFrame], style: Style) -> Figure:
    """The loss by length, a panel for each model by its title: dashed before and without training,
    solid after STEPS more steps. Variants that lack some seeds are left out, because models of
    different seeds differ more than variants.
    """
    figure, panels = new_figure(style, len(models))
    handles: dict[str, Line2D] = {}
    for axes, (title, losses) in zip(panels, models.items(), strict=True):
        seeds = at(losses, "control", 0, 1).keys()
        for color, (variant, steps) in zip(COLORS, (*BEFORE, *AFTER), strict=False):
            means = means_at(losses, variant, steps, FACTORS)
            if means is None or at(losses, variant, steps, 1).keys() != seeds:
                continue
            label = f"{NAMES[variant]}, {steps} steps"
            dashes = "-" if steps else "--"
            (line,) = axes.plot(FACTORS, means, dashes, marker="o", markersize=3)
            line.set(color=color, label=label)
            handles[label] = line

        # Lengths as multiples.
        axes.set_title(title)
        axes.set_xscale("log", base=2)
        set_ticks(axes.xaxis, FACTORS)
        axes.set_xlabel("sequence length / training length L")
        axes.set_ylabel("loss (nats per token)")
    legend_above(figure, style, list(handles.values()))
    return figure
