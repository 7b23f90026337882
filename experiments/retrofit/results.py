"""The table and the figure of the retrofit experiment, from `records/`."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter
from pandas import DataFrame
from scipy.stats import t as t_distribution

from experiments.retrofit.run import FACTORS, TRAINED, UNTRAINED
from megatron.reporting.style import Style, legend_above, new_figure

RECORDS = Path(__file__).with_name("records")
STEPS = 300  # of the comparisons
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
    """The columns seed, variant, steps, length and loss of all records of each model in TITLES."""
    models = {}
    for model in TITLES:
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
    rows = losses[(losses["variant"] == variant) & (losses["steps"] == steps)]
    rows = rows[rows["length"] == length]
    return dict(zip(rows["seed"], rows["loss"], strict=True))


def length_name(multiple: int) -> str:
    """L, 4 L, ..."""
    return "L" if multiple == 1 else f"{multiple} L"


def retrofit_table(losses: DataFrame) -> str:
    """Mean losses at multiples of the training length: of the model before, without training, and
    after STEPS more steps. Markdown.
    """
    heads = " | ".join(map(length_name, SHOWN))
    lines = [f"| added | steps | seeds | {heads} |", "| :-- | --: | --: |" + " --: |" * len(SHOWN)]
    rows = [("control", 0), *((variant, 0) for variant in UNTRAINED)]
    rows += [(variant, STEPS) for variant in TRAINED]
    for variant, steps in rows:
        values = [at(losses, variant, steps, multiple) for multiple in SHOWN]
        if not values[0]:
            continue
        means = " | ".join(f"{statistics.fmean(each.values()):.2f}" for each in values)
        lines.append(f"| {NAMES[variant]} | {steps} | {len(values[0])} | {means} |")
    return "\n".join(lines)


def retrofit_differences(losses: DataFrame) -> str:
    """KERPLE (log) minus what it is compared with, paired by seed. Markdown."""
    lines = ["| KERPLE (log), 300 steps, minus | at | nats | 95 % interval |"]
    lines.append("| :-- | --: | --: | --: |")
    others = [("control", STEPS), *((variant, 0) for variant in UNTRAINED)]
    for variant, steps in others:
        for multiple in (1, FAR):
            mine = at(losses, "kerple_log", STEPS, multiple)
            theirs = at(losses, variant, steps, multiple)
            differences = [mine[seed] - theirs[seed] for seed in mine.keys() & theirs.keys()]
            if not differences:
                continue
            place = length_name(multiple)
            mean = statistics.fmean(differences)
            lines.append(f"| {NAMES[variant]} | {place} | {mean:+.3f} | {interval(differences)} |")
    return "\n".join(lines)


def interval(differences: Sequence[float]) -> str:
    """Student's 95 % interval of the mean; a dash for one difference."""
    count = len(differences)
    if count < 2:
        return "–"
    width = float(t_distribution.ppf(0.975, count - 1)) * statistics.stdev(differences)
    width /= math.sqrt(count)
    mean = statistics.fmean(differences)
    return f"[{mean - width:+.3f}, {mean + width:+.3f}]"


def retrofit_plot(models: Mapping[str, DataFrame], style: Style) -> Figure:
    """The loss by length, a panel for each model by its title: dashed before and without training,
    solid after STEPS more steps.
    """
    figure, panels = new_figure(style, len(models))
    curves = [("control", 0, "--"), *((variant, 0, "--") for variant in UNTRAINED)]
    curves += [(variant, STEPS, "-") for variant in TRAINED]
    handles: dict[str, Line2D] = {}
    for axes, (title, losses) in zip(panels, models.items(), strict=True):
        for index, (variant, steps, dashes) in enumerate(curves):
            values = [at(losses, variant, steps, multiple) for multiple in FACTORS]
            if not values[0]:
                continue
            means = [statistics.fmean(each.values()) for each in values]
            label = NAMES[variant] if steps else f"{NAMES[variant]}, 0 steps"
            (line,) = axes.plot(FACTORS, means, dashes, marker="o", markersize=3)
            line.set(color=COLORS[index], label=label)
            handles[label] = line

        # Lengths as multiples.
        axes.set_title(title)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(FACTORS))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("sequence length / training length L")
        axes.set_ylabel("loss (nats per token)")
    legend_above(figure, style, list(handles.values()))
    return figure
