"""Pictures of positional methods, and the page that shows them: bias and weight over distance, per head, at
initialization and after training.
"""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from megatron.checkpoint.configuration import checkpoint_config
from megatron.checkpoint.directory import find_step
from megatron.config import UserError
from megatron.evaluation.plots import COLOURS, STYLES
from megatron.files import write_atomically
from megatron.inference import load_model
from megatron.model.initialization import generator_for
from megatron.model.positional import ModelShape, PositionalMethod, build, primary_names
from megatron.model.positional.registry import canonical_name

FARTHEST = 1024
# More heads than this would be a tangle: these are spread over all of them.
MOST_HEADS = 6
SHAPE = ModelShape(num_heads=4, head_size=32, hidden_size=128, num_layers=4, max_positions=128)
SEED = 1234


def initial_methods() -> dict[str, PositionalMethod]:
    """`pos-emb` name -> the method as a new model of the demonstration's size has it; one name for each, no alias."""
    found = {}
    for name in primary_names():
        found[name] = build(name, SHAPE)
        # As the demonstration's run has them before its first step.
        found[name].reset_parameters(generator_for(SEED, -1, "positional"))
    return found


def trained_methods(folders: Sequence[str | Path]) -> dict[str, PositionalMethod]:
    """Primary `pos-emb` name -> the method of the checkpoint in each folder; where each layer has one, the first's.

    Raises UserError for two checkpoints of one method, and for a folder without one.
    """
    found: dict[str, PositionalMethod] = {}
    for folder in folders:
        name = canonical_name(checkpoint_config(find_step(folder)).model.pos_emb)
        if name in found:
            raise UserError(f"{folder}: a checkpoint of pos-emb {name} was given before; give one for each method")
        model, _ = load_model(folder)
        methods = model.positional_methods()
        if methods:
            found[name] = next(iter(methods.values()))
    return found


@torch.no_grad()
def curves(method: PositionalMethod) -> dict[str, Tensor]:
    """What the method has of "bias" and "weight", float32 `[h, FARTHEST]`; nothing where they are not functions of the
    distance alone.
    """
    distance = torch.arange(FARTHEST, dtype=torch.float32)
    hooks = [name for name in ("bias", "weight") if getattr(method, f"has_{name}")]
    return {name: getattr(method, name)(distance).cpu() for name in hooks}


def draw(name: str, stages: Mapping[str, PositionalMethod]) -> bytes | None:
    """A PNG with a row for each of bias and weight and a column for each stage ("at initialization", ...); None for a
    method that has neither.
    """
    tables = {stage: curves(method) for stage, method in stages.items()}
    hooks = [hook for hook in ("bias", "weight") if any(hook in found for found in tables.values())]
    if not hooks:
        return None
    figure = Figure(figsize=(3.6 * len(tables) + 1.4, 2.5 * len(hooks) + 0.3), layout="constrained", dpi=100)
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(hooks), len(tables), squeeze=False, sharex=True, sharey="row")
    for row, hook in zip(grid, hooks, strict=True):
        for axes, (stage, found) in zip(row, tables.items(), strict=True):
            _lines(axes, found[hook])
            if hook == hooks[0]:
                axes.set_title(stage, loc="left", fontsize=9.5)
        row[0].set_ylabel(hook)
    for axes in grid[-1]:
        axes.set_xlabel("distance (tokens)")
    lines = grid[0][-1].get_lines()
    figure.legend(handles=lines, loc="outside right upper", fontsize=8, frameon=False, handlelength=3)
    figure.suptitle(name, x=0.01, ha="left", fontsize=11, fontweight="bold")
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def _lines(axes: Axes, table: Tensor) -> None:
    """A line for each head, with a colour and a style of its own; the axis is logarithmic from distance 1 on."""
    heads = len(table)
    shown = (
        range(heads) if heads <= MOST_HEADS else [round(i * (heads - 1) / (MOST_HEADS - 1)) for i in range(MOST_HEADS)]
    )
    for number, head in enumerate(shown):
        axes.plot(
            range(table.shape[1]),
            table[head].tolist(),
            label=f"head {head + 1}",
            color=COLOURS[number % len(COLOURS)],
            linestyle=STYLES[number % len(STYLES)],
            linewidth=1.6,
        )
    axes.set_xscale("symlog", base=2, linthresh=1)
    axes.set_xlim(0, table.shape[1] - 1)
    powers = range(0, int(math.log2(table.shape[1])) + 1, 2)
    axes.set_xticks([0, *(2**power for power in powers)], ["0", *(f"{2**power:,}" for power in powers)])
    axes.tick_params(labelsize=8)
    axes.grid(color="#DDDDDD", linewidth=0.6)
    low = float(table.min())
    if low < -40:  # beyond, a probability is nothing, and steep heads would flatten all others to one line
        axes.set_ylim(-20, max(1.0, float(table.max())))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def write_page(output: str | Path, folders: Sequence[str | Path] = ()) -> list[Path]:
    """Write `output` (Markdown) and a picture for each method with bias or weight into `pictures/` beside it."""
    output = Path(output)
    pictures = output.parent / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    trained = trained_methods(folders)
    written: list[Path] = []
    drawn, others = [], []
    for name, method in initial_methods().items():
        stages = {"at initialization": method}
        if name in trained:
            stages["after training"] = trained[name]
        picture = draw(name, stages)
        text = " ".join((type(method).__doc__ or "").strip().split("\n\n")[0].split())
        if picture is None:
            others.append(f"- `{name}`: {text}")
            continue
        path = pictures / f"{name}.png"
        write_atomically(path, picture)
        written.append(path)
        drawn.append(f"## {name}\n\n{text}\n\n![{name}: bias and weight over distance](pictures/{path.name})\n")
    page = PAGE.format(methods="\n".join(sorted(drawn)), others="\n".join(sorted(others)))
    write_atomically(output, page.encode())
    return [output, *written]


PAGE = """# Positional methods in pictures

Written by `python tools/plot_kernels.py`. Attention computes softmax(weight * q.k / sqrt(d) + bias). Each line is one
head of a model of the demonstration's size (`configs/demo.yml`: 4 heads, trained at length 128), at initialization and,
for some methods, after that training. Where a bias falls below -40 the picture ends at -20: there a key is as good as
unseen.

{methods}
## Methods without a function of the distance

{others}
"""
