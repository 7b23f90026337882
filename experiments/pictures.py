"""The page `docs/positional-methods.md` and its plots: the effect of every positional method on the
scores by distance, at initialization and after training.

For methods whose result depends on more than the distance, the plots use scores and queries of
zeros.
"""

import argparse
import math
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import check_megatron  # noqa: F401
from kerple.attention import score_table
from kerple.positional import (
    Chunk,
    ModelShape,
    PositionalMethod,
    build,
    method_class,
    primary_names,
)
from kerple.positional.registry import canonical_name
from megatron.checkpoint.configuration import checkpoint_config
from megatron.checkpoint.directory import find_step
from megatron.config.yaml_files import PACKAGED
from megatron.inference import load_model
from megatron.model.initialization import generator_for
from megatron.reporting.style import (
    COLORS,
    LINE_STYLES,
    SCREEN,
    Style,
    legend_above,
    new_figure,
    render,
)
from megatron.utils.command_line import run_main
from megatron.utils.errors import UserError
from megatron.utils.files import write_atomically

NUM_DISTANCES = 1024
CONFIGS = PACKAGED / "pos_emb"
MAX_HEADS = 6  # if there are more heads, this many evenly spaced ones are plotted
# The model of configs/demo.yml.
SHAPE = ModelShape(num_heads=4, head_size=32, hidden_size=128, num_layers=4, max_positions=128)
SEED = 1234
fill = partial(textwrap.fill, width=100, break_on_hyphens=False)


class MethodOfModel(NamedTuple):
    """A positional method, the shape of its model, and the number of distances to plot."""

    method: PositionalMethod
    shape: ModelShape
    num_distances: int = NUM_DISTANCES


def initial_methods() -> dict[str, MethodOfModel]:
    """All methods by primary name, initialized as in the first layer of a new demo model."""
    methods = {}
    for name in primary_names():
        method = build(name, SHAPE)
        method.reset_parameters(generator_for(SEED, -1, "positional"))
        methods[name] = MethodOfModel(method, SHAPE)
    return methods


def trained_methods(folders: Sequence[str | Path]) -> dict[str, MethodOfModel]:
    """The methods of the checkpoints in these folders by primary `pos-emb` name; that of the first
    layer if the layers differ. Raises UserError if two checkpoints have the same method or a folder
    has no checkpoint.
    """
    names: set[str] = set()
    methods: dict[str, MethodOfModel] = {}
    for folder in folders:
        name = canonical_name(checkpoint_config(find_step(folder)).model.pos_emb)
        if name in names:
            raise UserError(
                f"{folder}: there is already a checkpoint of pos-emb {name}; give one per method"
            )
        names.add(name)

        # The method of the first layer.
        model, _ = load_model(folder)
        for method in model.positional_methods().values():
            methods.setdefault(name, MethodOfModel(method, model.settings.config.shape))
    return methods


@torch.no_grad()
def distance_curves(
    method: PositionalMethod, shape: ModelShape = SHAPE, num_distances: int = NUM_DISTANCES
) -> dict[str, Tensor]:
    """The effect of the method at distances 0 to num_distances - 1: axis label -> float32 [heads,
    num_distances].

    - Methods that modify scores: the result for scores of 0 and a query of zeros at position
      num_distances - 1; empty if it is the same for all distances.
    - Other methods: their bias (for hidden states of zeros, if it depends on them) and weight, if
      they have them. If they rotate, also the dot product of a query and a key of ones, divided by
      the head size, `[1, num_distances]`.
    """
    positions = torch.arange(num_distances)
    last = positions[-1:]

    # The result for scores of 0 and a query of zeros.
    if "modify_scores" in method.hooks:
        zeros = torch.zeros(1, shape.num_heads, 1, shape.head_size)
        query, _ = method.rotate(zeros, zeros[:, :, :0], last, positions[:0])
        scores = torch.zeros(1, shape.num_heads, 1, num_distances)
        mask = torch.zeros(1, num_distances, dtype=torch.bool)
        table = score_table(method, num_distances, "cpu")
        chunk = Chunk(scores, query, last, positions, mask, table)
        modified = method.final_scores(chunk)[0, :, 0].flip(-1)  # [h, n]
        if not modified.std(dim=1).any():
            return {}
        return {"modified score of 0": modified}

    # What the other hooks add or multiply, by distance.
    curves = {}
    if "rotate" in method.hooks:
        ones = torch.ones(1, 1, num_distances, shape.head_size)
        query, key = method.eval().rotate(ones[:, :, -1:], ones, last, positions)
        if "scale_qk" in method.hooks:
            query, key = method.scale_qk(query, key, last, positions)
        products = (query @ key.transpose(-1, -2))[0, :, 0].flip(-1)  # [h, n]
        curves["dot product of ones"] = products / shape.head_size
    if "bias" in method.hooks:
        curves["bias"] = method.bias(positions.float())
    if "decay" in method.hooks:
        decay = method.decay(torch.zeros(1, num_distances, shape.hidden_size))[0]
        curves["bias"] = decay.cumsum(dim=1) - decay[:, :1]
    if "weight" in method.hooks:
        curves["weight"] = method.weight(positions.float())
    return curves


def method_picture(name: str, stages: Mapping[str, MethodOfModel]) -> bytes | None:
    """A PNG with a row per curve and a column per stage; None if there are no curves."""
    curves = {stage: distance_curves(*method) for stage, method in stages.items()}
    labels = list(dict.fromkeys(label for by_label in curves.values() for label in by_label))
    if not labels:
        return None
    return render(
        partial(_stages_plot, name, curves, labels),
        replace(SCREEN, width=3.0 * len(curves) + 1.0, dpi=100),
    )


def _stages_plot(
    name: str, curves: Mapping[str, Mapping[str, Tensor]], labels: Sequence[str], style: Style
) -> Figure:
    # A row per curve, a column per stage.
    stages = len(curves)
    figure, panels = new_figure(style, len(labels) * stages, stages, sharex=True, sharey="row")
    cells = [(label, stage) for label in labels for stage in curves]
    for axes, (label, stage) in zip(panels, cells, strict=True):
        if label in curves[stage]:
            _plot_heads(axes, curves[stage][label])
        if label == labels[0]:
            axes.set_title(stage, loc="left")
        if label == labels[-1]:
            axes.set_xlabel("distance (tokens)")
        if stage == next(iter(curves)):
            axes.set_ylabel(label)

    # The legend, or the title of a picture with one head.
    lines = max((axes.get_lines() for axes in panels), key=len)
    if len(lines) > 1:
        legend_above(figure, style, lines, name)
    else:
        figure.suptitle(name, fontsize=1.1 * style.size, fontweight="bold")
    return figure


def _plot_heads(axes: Axes, values: Tensor) -> None:
    """One line per head of values `[h, n]`, over a distance axis that is logarithmic from 1."""
    # Heads that are evenly spaced, with the first and the last one.
    num_heads, num_distances = values.shape
    shown = min(num_heads, MAX_HEADS)
    for index in range(shown):
        head = round(index * (num_heads - 1) / max(1, shown - 1))
        axes.plot(
            range(num_distances),
            values[head].tolist(),
            label=f"head {head + 1}",
            color=COLORS[index % len(COLORS)],
            linestyle=LINE_STYLES[index % len(LINE_STYLES)],
        )

    # A logarithmic axis with 0.
    axes.set_xscale("symlog", base=2, linthresh=1)
    axes.set_xlim(0, num_distances - 1)
    powers = [2**exponent for exponent in range(0, int(math.log2(num_distances)) + 1, 2)]
    axes.set_xticks([0, *powers], ["0", *(f"{power:,}" for power in powers)])
    axes.grid(color="#DDDDDD", linewidth=0.6)
    if float(values.min()) < -40:  # keep the lines of the other heads apart
        axes.set_ylim(-20, max(1.0, float(values.max())))


def write_page(
    output: str | Path, folders: Sequence[str | Path] = (), only: Sequence[str] | None = None
) -> list[Path]:
    """Write the Markdown page, and the pictures into `pictures/` next to it.

    Args:
        folders: checkpoints, whose methods are also shown after training.
        only: draw the pictures of these methods; the page shows the others as they are. None: draw
            all.

    Returns the paths of the page and of the pictures that were drawn.
    """
    output = Path(output)
    pictures = output.parent / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    trained = trained_methods(folders)
    paths: list[Path] = []
    entries: dict[str, list[str]] = {family: [] for family in FAMILIES}
    for name, initial in initial_methods().items():
        # Training changes only methods with parameters.
        stages = {"at initialization": initial}
        if name in trained and list(trained[name].method.parameters()):
            stages["after training"] = trained[name]

        # The description, and the picture, if there is one.
        entry, path = f"### {name}\n\n{fill(description(name))}\n", pictures / f"{name}.png"
        if only is None or name in only:
            picture = method_picture(name, stages)
            if picture is not None:
                write_atomically(path, picture)
                paths.append(path)
        if path.exists():
            entry += f"\n![{name}](pictures/{path.name})\n"

        # Its section of the page.
        family = "Other biases, and position embeddings"
        if name.startswith("kerple"):
            family = "KERPLE"
        elif "modify_scores" in initial.method.hooks:
            family = "Methods that modify the scores"
        elif "rotate" in initial.method.hooks:
            family = "Rotary"
        entries[family].append(entry)
    sections = []
    for family, text in FAMILIES.items():
        sections.append(f"## {family}\n\n{fill(text)}\n\n" + "\n".join(entries[family]))
    write_atomically(output, (PAGE + "\n".join(sections)).encode())
    return [output, *paths]


def description(name: str) -> str:
    """The comment in the method's file in configs/pos_emb/, or else the start of its docstring."""
    path = CONFIGS / f"{name}.yml"
    if not path.is_file():
        first, _, _ = (method_class(name).__doc__ or "").strip().partition("\n\n")
        return " ".join(first.split())
    lines = path.read_text(encoding="utf-8").splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))


FAMILIES = {
    "KERPLE": "Kernels of the distance, learned per head, added to the scores (bias) or multiplied "
    "with them (weight).",
    "Other biases, and position embeddings": "Position embeddings have no plot. The plots of "
    "`cable` and `forgetting` show hidden states of zeros.",
    "Rotary": "Queries and keys are rotated by their positions. The plots show the dot product of "
    "a query and a key of ones, divided by the head size.",
    "Methods that modify the scores": "The result also depends on the scores of all heads, the "
    "query, or its position. The plots show the first layer for scores of 0 and a query of zeros "
    "at position 1,023. Methods whose result is then the same at all distances have no plot.",
}

PAGE = """# Positional methods in pictures

Attention is softmax(weight * q.k / sqrt(d) + bias). The plots show the bias and the weight by
distance, one line per head, for the model of `configs/demo.yml` (4 heads): at initialization, and
after training at length 128 if this changes the method. The axis of a bias below -40 ends at -20.

`make pictures` trains the methods in `experiments/pictures.yml` and writes this page; `python
experiments/pictures.py --checkpoint DIR ...` writes one for other checkpoints.

## Random positions

With {"pos-emb-options": {"random_range": N}}, each training step draws an increasing sample of N
positions for its tokens (arXiv 2305.16843). Methods without positions, such as CoPE, reject this
option. Methods with a bias or weight then use the chunked backend.

Evaluation at L tokens uses one sample of L positions. Generation and tasks use the beginning of one
sample of random_length positions (default: max-position-embeddings); for longer texts, raise it.
Such models cannot be exported. Distances are differences of sampled positions; the ALiBi variant of
the authors samples distances along diagonals.

"""


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page and the pictures. Raises UserError."""
    parser = argparse.ArgumentParser(
        description="Plot the bias and weight of every positional method by distance."
    )
    parser.add_argument(
        "--output",
        default="runs/plots/positional-methods.md",
        metavar="FILE",
        help="the page; the pictures go into pictures/ next to it (default: %(default)s)",
    )
    parser.add_argument(
        "--checkpoint",
        nargs="+",
        default=[],
        metavar="DIR",
        help="one per method; these are also shown after training",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=primary_names(),
        metavar="NAME",
        help="keep the pictures of other methods as they are",
    )
    options = parser.parse_args(argv)
    paths = write_page(options.output, options.checkpoint, options.only)
    print(f"wrote {paths[0]} and {len(paths) - 1} pictures")


if __name__ == "__main__":
    sys.exit(run_main(main))
