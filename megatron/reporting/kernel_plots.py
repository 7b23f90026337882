"""Pictures of positional methods, and the page that shows them: bias and weight over distance, per head, at
initialization and after training.

Of methods whose scores depend on more than the distance, it shows what they make of scores that say nothing.
"""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from kerple.attention import score_table
from kerple.positional import ModelShape, PositionalMethod, build, method_class, primary_names
from kerple.positional.registry import canonical_name
from megatron.checkpoint.configuration import checkpoint_config
from megatron.checkpoint.directory import find_step
from megatron.config import UserError
from megatron.inference import load_model
from megatron.model.initialization import generator_for
from megatron.reporting.figures import COLORS, LINE_STYLES
from megatron.utils.files import write_atomically

FARTHEST = 1024
DESCRIPTIONS = Path(__file__).resolve().parents[2] / "configs" / "pos_emb"
# What a row of a picture shows.
BIAS, WEIGHT, ADAPTED, PRODUCT = "bias", "weight", "score made of 0", "product, equal vectors"
# More heads than this would be a tangle: these are spread over all of them.
MOST_HEADS = 6
SHAPE = ModelShape(num_heads=4, head_size=32, hidden_size=128, num_layers=4, max_positions=128)
SEED = 1234


class Placed(NamedTuple):
    """A method and the model that it is made for."""

    method: PositionalMethod
    shape: ModelShape


def initial_methods() -> dict[str, Placed]:
    """`pos-emb` name -> the method as a new model of the demonstration's size has it; one name for each, no alias."""
    found = {}
    for name in primary_names():
        found[name] = Placed(build(name, SHAPE), SHAPE)
        # As the demonstration's run has them before its first step.
        found[name].method.reset_parameters(generator_for(SEED, -1, "positional"))
    return found


def trained_methods(folders: Sequence[str | Path]) -> dict[str, Placed]:
    """Primary `pos-emb` name -> the method of the checkpoint in each folder; where each layer has one, the first's.

    Raises UserError for two checkpoints of one method, and for a folder without one.
    """
    found: dict[str, Placed] = {}
    for folder in folders:
        name = canonical_name(checkpoint_config(find_step(folder)).model.pos_emb)
        if name in found:
            raise UserError(f"{folder}: a checkpoint of pos-emb {name} was given before; give one for each method")
        model, _ = load_model(folder)
        methods = model.positional_methods()
        if methods:
            found[name] = Placed(next(iter(methods.values())), model.settings.shape())
    return found


@torch.no_grad()
def curves(method: PositionalMethod, shape: ModelShape = SHAPE) -> dict[str, Tensor]:
    """What the method makes of distances 0 ... FARTHEST - 1, float32 `[h, FARTHEST]`: its bias and weight; the score
    that `modify_scores` makes of 0, of a query that is zero; the product of a turned vector with itself,
    `[1, FARTHEST]`.
    Nothing where the distance alone makes no difference.
    """
    if method.modifies_scores:
        scores = _adapted(method, shape)
        return {ADAPTED: scores} if scores.std(dim=1).any() else {}
    if method.rotates:
        return {PRODUCT: _product(method, shape)}
    distance = torch.arange(FARTHEST, dtype=torch.float32)
    hooks = [name for name in (BIAS, WEIGHT) if getattr(method, f"has_{name}")]
    return {name: getattr(method, name)(distance).cpu() for name in hooks}


def _adapted(method: PositionalMethod, shape: ModelShape) -> Tensor:
    """As seen from position FARTHEST - 1."""
    keys = torch.arange(FARTHEST)
    nothing = torch.zeros(1, shape.num_heads, 1, shape.head_size)
    query, _ = method.rotate(nothing, nothing[:, :, :0], keys[-1:], keys[:0])
    scores, unseen = torch.zeros(1, shape.num_heads, 1, FARTHEST), torch.zeros(1, FARTHEST, dtype=torch.bool)
    table = score_table(method, FARTHEST, "cpu")
    return method.modify_scores(scores, query, keys[-1:], keys, unseen, table)[0, :, 0].flip(-1)


def _product(method: PositionalMethod, shape: ModelShape) -> Tensor:
    """Of a vector of ones, divided by the head size."""
    keys = torch.arange(FARTHEST)
    states = torch.ones(1, 1, FARTHEST, shape.head_size)
    query, key = method.eval().rotate(states[:, :, -1:], states, keys[-1:], keys)
    if method.scales_qk:
        query, key = method.scale_qk(query, key, keys[-1:], keys)
    return (query @ key.transpose(-1, -2))[0, :, 0].flip(-1) / shape.head_size


def draw(name: str, stages: Mapping[str, Placed]) -> bytes | None:
    """A PNG with a row for each of the method's curves and a column for each stage ("at initialization", ...); None for
    a method that has none.
    """
    tables = {stage: curves(*placed) for stage, placed in stages.items()}
    hooks = list(dict.fromkeys(hook for found in tables.values() for hook in found))
    if not hooks:
        return None
    figure = Figure(figsize=(3.6 * len(tables) + 1.4, 2.5 * len(hooks) + 0.3), layout="constrained", dpi=100)
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(hooks), len(tables), squeeze=False, sharex=True, sharey="row")
    for row, hook in zip(grid, hooks, strict=True):
        for axes, (stage, found) in zip(row, tables.items(), strict=True):
            if hook in found:
                _lines(axes, found[hook])
            if hook == hooks[0]:
                axes.set_title(stage, loc="left", fontsize=9.5)
        row[0].set_ylabel(hook)
    for axes in grid[-1]:
        axes.set_xlabel("distance (tokens)")
    lines = grid[0][-1].get_lines() or grid[0][0].get_lines()
    if len(lines) > 1:
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
            color=COLORS[number % len(COLORS)],
            linestyle=LINE_STYLES[number % len(LINE_STYLES)],
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
    """Write `output` (Markdown) and the methods' pictures into `pictures/` beside it; trained ones from the checkpoints
    in these folders.
    """
    output = Path(output)
    pictures = output.parent / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    trained = trained_methods(folders)
    written: list[Path] = []
    entries: dict[str, list[str]] = {family: [] for family in FAMILIES}
    for name, placed in initial_methods().items():
        stages = {"at initialization": placed}
        if name in trained and next(trained[name].method.parameters(), None) is not None:
            stages["after training"] = trained[name]
        entry = f"### {name}\n\n{description(name)}\n"
        picture = draw(name, stages)
        if picture is not None:
            path = pictures / f"{name}.png"
            write_atomically(path, picture)
            written.append(path)
            entry += f"\n![{name} over distance](pictures/{path.name})\n"
        entries[_family(name, placed.method)].append(entry)
    families = (f"## {family}\n\n{FAMILIES[family]}\n\n" + "\n".join(found) for family, found in entries.items())
    write_atomically(output, (PAGE + "\n".join(families)).encode())
    return [output, *written]


def description(name: str) -> str:
    """What the comment of the method's file of configuration says; of a method without one, its class."""
    path = DESCRIPTIONS / f"{name}.yml"
    if not path.is_file():
        return " ".join((method_class(name).__doc__ or "").strip().split("\n\n")[0].split())
    lines = path.read_text(encoding="utf-8").splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))


def _family(name: str, method: PositionalMethod) -> str:
    kerple, others, rotary, adaptive = FAMILIES
    if name.startswith("kerple"):
        return kerple
    if method.modifies_scores:
        return adaptive
    return rotary if method.rotates else others


FAMILIES = {
    "KERPLE": "Kernels of the distance, as a bias that is added to the scores or as a weight that multiplies them.",
    "Other biases, and positions in the embeddings": "What KERPLE is compared with. Positions that are added to the "
    "embeddings have nothing to draw over the distance.",
    "Rotary": "Queries and keys are turned by their positions. Drawn is the product of a query and a key of ones, "
    "divided by their size; all heads are alike.",
    "Methods that make the scores": "What is added depends on more than the distance: on the scores of all heads, the "
    "query, or its position. Drawn is what a method makes of scores of 0 for a query of zeros at position 1,023, in "
    "the first layer. `cope` and `dape` then tell no distance from another; at the ends, a convolution of `dape_v2` "
    "sees fewer keys.",
}

PAGE = """# Positional methods in pictures

Attention computes softmax(weight * q.k / sqrt(d) + bias). Each line is one head of a model of the demonstration's size
(`configs/demo.yml`: 4 heads, trained at length 128), at initialization and, where something is learned and there is a
second column, after that training. Where a bias falls below -40 the picture ends at -20: there a key is as good as
unseen.

`make pictures` trains what is missing and writes this page; `python tools/plot_kernels.py --checkpoint DIR ...` writes
it from any checkpoints. The sentences are those of `configs/pos_emb/`.

"""
