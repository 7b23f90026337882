"""Figures of the weights of a checkpoint: bias and weight by distance (KERPLE, Figures 2 to 4),
effective lengths (KERPLE, Figure 6), and the scores and biases of one query (DAPE, Figure 1).

Legend: h heads, n distances or keys.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, SymmetricalLogLocator
from torch import Tensor

from kerple.attention import Span, score_table
from kerple.positional import Chunk, method_class
from kerple.positional.dape import Adaptive
from kerple.positional.fire import Fire
from megatron.checkpoint.configuration import checkpoint_config, code_notice
from megatron.checkpoint.directory import find_step, looks_like_checkpoint
from megatron.checkpoint.inspection import verified_methods
from megatron.checkpoint.manifest import weights_fingerprint
from megatron.convert.hub import local_checkpoint
from megatron.data.streams import evaluation_stream
from megatron.evaluation.metrics.effective_length import LIMIT
from megatron.evaluation.records import model_of
from megatron.inference import load_model
from megatron.model.gpt import GPT
from megatron.reporting.aggregate import AnyRecord, Method, Setting, method_of, setting_of
from megatron.reporting.figures import ReportFigure
from megatron.reporting.formatting import slug
from megatron.reporting.published import corpus_name, display_name, line_numbers
from megatron.reporting.report import Sources
from megatron.reporting.style import (
    COLORS,
    LINE_STYLES,
    SCREEN,
    Style,
    legend_above,
    line_style,
    new_figure,
    thousands,
)
from megatron.utils.errors import UserError

QUANTITIES: tuple[Literal["bias", "weight"], ...] = ("bias", "weight")

# exp(bias) is the factor that the bias contributes to the softmax: close to 0 below this bias.
LOWEST_BIAS_SHOWN = -10.0
MAX_LAYERS = 12
MAX_ADAPTIVE_HEADS = 3
MAX_ADAPTIVE_LENGTH = 8192

# -- bias and weight by distance ------------------------------------------------------------------


@dataclass(frozen=True)
class DistanceTable:
    """Bias and weight by distance of the method of a checkpoint, or of one of its layers.

    Attributes:
        label: "layer 3", or "all layers" if the layers share the method.
        bias: float32 [h, n], added to the scores, for distances from 0; None if the method has
            none.
        weight: float32 [h, n], multiplies the scores; None if the method has none.
        effective_lengths: int64 [h], the smallest distance with a bias below -2, or LIMIT if there
            is none; None without a bias.
    """

    pos_emb: str
    label: str
    bias: Tensor | None
    weight: Tensor | None
    effective_lengths: Tensor | None


@torch.no_grad()
def distance_tables(
    directory: str | Path, iteration: int | None = None, *, num_distances: int = 16_384
) -> list[DistanceTable]:
    """The tables of a checkpoint for distances 0 to `num_distances` - 1, empty if its method has
    neither bias nor weight. Only the positional parameters are read. Raises CheckpointError if the
    checkpoint cannot be read or is damaged.
    """
    step = find_step(directory, iteration)
    config = checkpoint_config(step)
    distances = torch.arange(num_distances, dtype=torch.float32)
    tables = []
    for label, method in verified_methods(step, config.model):
        bias = weight = effective_lengths = None
        if "bias" in method.hooks:
            bias, effective_lengths = method.bias(distances), method.effective_length(LIMIT)
        if "weight" in method.hooks:
            weight = method.weight(distances)
        if method.hooks & {"bias", "weight"}:
            name = config.model.pos_emb
            tables.append(DistanceTable(name, label, bias, weight, effective_lengths))
    return tables


def distance_figures(
    tables: Sequence[DistanceTable], *, model: str, name: str
) -> list[ReportFigure]:
    """A figure of the bias and one of the weight, if the method has them; one panel per layer if
    the layers differ.

    Args:
        model: description of the model, for the titles.
        name: part of the file names.
    """
    figures = []
    long_names = {"bias": "bias", "weight": "score weight"}
    for quantity in QUANTITIES:
        # The tables that have it, a panel each.
        values = [(table.label, getattr(table, quantity)) for table in tables]
        panels = [(label, table) for label, table in values if table is not None]
        if not panels:
            continue
        num_layers, panels = len(panels), panels[:MAX_LAYERS]

        # What the caption explains depends on the number of panels.
        caption = (
            f"The {long_names[quantity]} of each head by distance (KERPLE, Figures 2 to 4). Dark "
            "lines: heads with the steepest decrease; light lines: flattest heads."
        )
        if len(panels) == 1:
            caption += " The second panel has a logarithmic distance axis"
            if quantity == "bias":
                caption += (
                    f" and shows biases above {LOWEST_BIAS_SHOWN:g}; lower ones leave almost no "
                    "attention"
                )
            caption += "."
        elif num_layers > len(panels):
            caption += f" The first {len(panels)} of {num_layers} layers."
        title = f"{quantity.capitalize()} by distance: {model}"
        draw = partial(distance_plot, quantity, panels)
        figures.append(ReportFigure(slug("kernels", name, quantity), title, caption, draw))
    return figures


def distance_plot(
    quantity: Literal["bias", "weight"], layers: Sequence[tuple[str, Tensor]], style: Style = SCREEN
) -> Figure:
    """Values by distance. A single layer has a second panel, with a logarithmic distance axis; the
    heads of several layers have no legend, because their order differs.

    Args:
        layers: (label, values float32 [h, n] at distances from 0).
    """
    if len(layers) == 1:
        columns = style.columns(2, 16)
        figure, panels = new_figure(style, 2, columns)
        for axes in panels:
            _plot_heads(axes, layers[0][1])
        panels[0].set_ylabel(quantity)
        base = 10 if columns == 1 else 100
        _symlog_distance(panels[1], base)
        if quantity == "bias":
            # Some biases of T5 are positive.
            highest = max(0.0, layers[0][1].max().item())
            margin = 0.02 * (highest - LOWEST_BIAS_SHOWN)
            panels[1].set_ylim(LOWEST_BIAS_SHOWN, highest + margin)

        # The legend is in the order of the heads.
        lines = {line.get_label(): line for line in panels[0].lines}
        handles = [lines[f"head {number}"] for number in range(1, len(lines) + 1)]
        legend_above(figure, style, handles)
    else:
        columns = style.columns(min(4, len(layers)))
        figure, panels = new_figure(style, len(layers), columns, sharex=True)
        for axes, (label, values) in zip(panels, layers, strict=True):
            _plot_heads(axes, values)
            axes.set_title(label, loc="left")
        figure.supylabel(quantity)
    figure.supxlabel("distance between query and key (tokens)")
    return figure


def _plot_heads(axes: Axes, values: Tensor) -> None:
    """One line per head, dark to light from the smallest mean value `[h, n]` to the largest."""
    order = values.double().mean(dim=1).argsort(stable=True).tolist()
    for rank, head in enumerate(order):
        axes.plot(
            values[head].double().numpy(),
            label=f"head {head + 1}",
            color=colormaps["cividis"](0.88 * rank / max(1, len(order) - 1)),
            linestyle=LINE_STYLES[rank % len(LINE_STYLES)],
        )
    axes.set_xlim(0, values.shape[1] - 1)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4))
    thousands(axes)


def _symlog_distance(axes: Axes, base: int = 10) -> None:
    """A distance axis that is logarithmic from 1 on, with ticks at the powers of `base`."""
    axes.set_xscale("symlog", linthresh=1)
    axes.xaxis.set_major_locator(SymmetricalLogLocator(base=base, linthresh=1))
    thousands(axes)


# -- effective lengths ----------------------------------------------------------------------------


def effective_length_figure(
    lengths: Mapping[str, Sequence[int]], numbers: Mapping[str, int], *, model: str, name: str
) -> ReportFigure:
    """The share of heads up to each effective length.

    Args:
        lengths: label -> effective lengths of all heads (of all layers, if the layers differ).
        numbers: label -> number of its line style.
    """
    return ReportFigure(
        slug("effective-lengths", name),
        f"Effective lengths: {model}",
        "Share of heads whose effective length is at most the value on the x axis (KERPLE, Figure "
        "6: number), of the model with the lowest seed of each method. The effective length of a "
        "head is the smallest distance with a bias below -2. "
        "If a line ends below 1, the effective lengths of the remaining heads are larger than "
        f"{LIMIT:,} tokens.",
        partial(effective_length_plot, lengths, numbers),
    )


def effective_length_plot(
    lengths: Mapping[str, Sequence[int]], numbers: Mapping[str, int], style: Style = SCREEN
) -> Figure:
    figure, (axes,) = new_figure(style)
    for label, head_lengths in lengths.items():
        ends = sorted(length for length in head_lengths if length < LIMIT)
        distances = [0, *ends, LIMIT]
        shares = [count / len(head_lengths) for count in (*range(len(ends) + 1), len(ends))]
        look = line_style(style, numbers[label]) | {"marker": None}
        axes.step(distances, shares, where="post", label=label, **look)
    _symlog_distance(axes)
    axes.set_xlim(0, LIMIT)
    axes.set_ylim(0, 1.04)
    axes.set_xlabel("effective length (tokens)")
    axes.set_ylabel("share of heads")
    legend_above(figure, style, axes.get_legend_handles_labels()[0])
    return figure


# -- scores and biases of one query (DAPE) --------------------------------------------------------


@dataclass(frozen=True)
class QueryScores:
    """The last query of a text in the first layer, float32 [h, n] each, over its keys.

    Attributes:
        scores: A, the scaled dot products.
        static: B, the static bias; None if the method has none.
        adapted: f(A, B), the output of DAPE's network.
        position: of the query. The keys end with its own.
    """

    scores: Tensor
    static: Tensor | None
    adapted: Tensor
    position: int


@torch.no_grad()
def query_scores(model: GPT, tokens: Tensor) -> QueryScores:
    """A, B and f(A, B) of the last of the tokens (int64 [n]) in the first layer of a model with
    DAPE.

    f(A, B) is what `modify_scores` adds to A, minus B if the variant also adds B.
    """
    attention = model.blocks[0].attention
    method = attention.rpe
    assert isinstance(method, Adaptive)

    # Queries and keys of the layer: run the model, and keep the layer's projection.
    outputs: list[Tensor] = []
    hook = attention.query_key_value.register_forward_hook(
        lambda module, inputs, output: outputs.append(output)
    )
    try:
        model.hidden(tokens[None])
    finally:
        hook.remove()
    query, key, _ = attention.heads(outputs[0])  # [1, h, n, d]
    positions = torch.arange(len(tokens))
    query, key = method.rotate(query, key, positions, positions)

    # A: the scores of the last query and the keys in its window.
    query = query[0].float()  # [h, n, d]
    key = key[0].repeat_interleave(attention.queries_per_key, dim=0).float()  # [h, n, d]
    key = key[:, Span(window=attention.window).first_key(len(tokens) - 1) :]
    length = key.shape[1]
    scores = (query[:, -1:] @ key.transpose(-1, -2) * attention.head_size**-0.5)[None]
    positions = positions[-length:]

    # B: a table over distance, or FIRE's bias of the pairs.
    static = None
    table = score_table(method, length, scores.device)
    if table is not None:
        static = table.flip(-1).float()  # [h, n]
    if isinstance(method.static, Fire):
        static = method.static.pair_bias(positions[-1:], positions, scores)[:, 0]

    # f(A, B): what the network adds to A, without B.
    mask = torch.zeros(1, length, dtype=torch.bool, device=scores.device)
    chunk = Chunk(scores.clone(), query[None, :, -1:], positions[-1:], positions, mask, table)
    modified = method.final_scores(chunk)  # [1, h, 1, n]
    adapted = modified[0, :, 0] - scores[0, :, 0]
    if static is not None and method.variant != "Concat":
        adapted = adapted - static
    return QueryScores(scores[0, :, 0], static, adapted, len(tokens) - 1)


def adaptive_figure(scores: QueryScores, *, model: str, name: str) -> ReportFigure:
    """DAPE's Figure 1: a row for each of A, B and f(A, B), a column for each of the first heads."""
    rows = [
        ("A: scores", scores.scores),
        ("B: static bias", scores.static),
        ("f(A, B): DAPE", scores.adapted),
    ]
    shown = [(label, values) for label, values in rows if values is not None]
    return ReportFigure(
        slug("adaptive", name),
        f"Scores and biases of one query: {model}",
        f"Attention scores of the query at position {scores.position:,} (DAPE, Figure 1): A, the "
        "scaled dot products of query and keys; B, the static bias; f(A, B), the output of DAPE's "
        "network.",
        partial(adaptive_plot, shown, scores.position),
    )


def adaptive_plot(
    rows: Sequence[tuple[str, Tensor]], position: int, style: Style = SCREEN
) -> Figure:
    """Labels and values `[h, n]` as rows, heads as columns. position: of the query."""
    # Keys can be only those of a window.
    num_heads, length = rows[0][1].shape
    keys = range(position + 1 - length, position + 1)
    columns = min(MAX_ADAPTIVE_HEADS, num_heads)
    figure, panels = new_figure(style, len(rows) * columns, columns, sharex=True, sharey="row")
    for index, axes in enumerate(panels):
        row, head = divmod(index, columns)
        label, values = rows[row]
        line = values[head].cpu().numpy()
        width = 0.07 * style.size
        is_long = length > 4096
        axes.plot(keys, line, color=COLORS[0], linewidth=width, rasterized=is_long)
        axes.set_xlim(keys.start, max(keys.start + 1, position))
        axes.locator_params(axis="x", nbins=3)
        thousands(axes)
        if head == 0:
            axes.set_ylabel(label)
        if index < columns:
            axes.set_title(f"head {head + 1}", loc="left")
    figure.supxlabel("key position (tokens)")
    figure.align_ylabels()
    return figure


def checkpoint_adaptive_figure(
    directory: str | Path, iteration: int | None = None, *, model: str, name: str
) -> ReportFigure | None:
    """`adaptive_figure` of a checkpoint's first layer, for a query at position 8,192 (as in the
    paper), or at 16 times the training length if that is less, of the validation text of its
    configuration. None if its method is not DAPE.

    Raises UserError if the checkpoint or its text cannot be read.
    """
    config = checkpoint_config(find_step(directory, iteration))
    if not issubclass(method_class(config.model.pos_emb), Adaptive):
        return None
    gpt, _ = load_model(directory, iteration)
    length = min(MAX_ADAPTIVE_LENGTH, 16 * config.model.seq_length)
    tokens, _ = evaluation_stream(config)
    return adaptive_figure(query_scores(gpt, tokens[:length]), model=model, name=name)


# -- all figures of a report ----------------------------------------------------------------------


def add_weight_figures(sources: Sources) -> None:
    """Add the figures of biases, weights and DAPE's scores to `sources.weight_figures`, those of
    effective lengths to `sources.length_figures`, and what is left out to `sources.notes`. Raises
    UserError.

    They show the checkpoint with the lowest seed for each method and setting in the records, then
    `sources.checkpoints`. The effective lengths of all methods of a setting share a figure; they
    come from the records if available.
    """
    # Effective lengths in the records, by the weights, configuration and code of the model.
    recorded_lengths = {}
    for record in sources.records:
        if record["kind"] == "effective_length":
            lengths_by_layer = record["effective_lengths"]
            recorded_lengths[model_of(record)] = list(itertools.chain(*lengths_by_layer))

    # The extrapolation record with the lowest seed, for each setting and method.
    weight_figures, length_figures = sources.weight_figures, sources.length_figures
    lengths: dict[Setting, dict[str, list[int]]] = {}
    lowest_seeds: dict[tuple[Setting, str], AnyRecord] = {}
    longest: dict[tuple[Setting, str], int] = {}  # of the tested lengths
    for record in sources.records:
        if record["kind"] == "extrapolation":
            key = replace(setting_of(record), protocol=""), method_of(record).pos_emb
            longest[key] = max(record["length"], longest.get(key, 2))
            lowest = lowest_seeds.setdefault(key, record)
            if (record.get("seed") or 0) < (lowest.get("seed") or 0):
                lowest_seeds[key] = record

    # Plot its checkpoint, unless that is missing or has changed since the evaluation.
    for (setting, pos_emb), record in lowest_seeds.items():
        name = display_name(Method(pos_emb))
        model = f"{name}, {corpus_name(setting.corpus)}"
        if record.get("seed") is not None:
            model += f", seed {record['seed']}"
        tables: list[DistanceTable] = []
        checkpoint = record.get("checkpoint") or {}
        path, iteration = checkpoint.get("path"), checkpoint.get("iteration")
        if path is not None and iteration is None:
            sources.notes.append(f"No kernels are plotted for {model}: a model of transformers.")
        elif path is not None:
            try:
                measured = checkpoint.get("fingerprint")
                path = _checkpoint_folder(path)
                if weights_fingerprint(find_step(path, iteration)) != measured:
                    raise UserError(
                        f"{path}: iteration {iteration} has other weights than those that were "
                        f"evaluated (fingerprint {measured}); evaluate it again"
                    )
                figure_name = f"{setting.name}-{slug(pos_emb).lower()}"
                adaptive = checkpoint_adaptive_figure(
                    path, iteration, model=model, name=figure_name
                )
                tables = distance_tables(path, iteration, num_distances=longest[setting, pos_emb])
                sources.notes += _code_notes(path, iteration)
            except (UserError, OSError) as error:
                sources.notes.append(f"No kernels are plotted for {model}: {error}.")
            else:
                if adaptive:
                    weight_figures.append(adaptive)
                weight_figures += distance_figures(tables, model=model, name=figure_name)

        # Prefer recorded effective lengths, which need no checkpoint.
        head_lengths = recorded_lengths.get(model_of(record)) or _effective_lengths(tables)
        if head_lengths:
            lengths.setdefault(setting, {})[name] = head_lengths

    # One figure of effective lengths per setting. A method has the same line in all of them.
    pos_embs = dict.fromkeys(method_of(record).pos_emb for record in sources.records)
    numbers = line_numbers({display_name(Method(pos_emb)): pos_emb for pos_emb in pos_embs})
    for setting, by_method in lengths.items():
        model = corpus_name(setting.corpus)
        figure = effective_length_figure(by_method, numbers, model=model, name=setting.name)
        length_figures.append(figure)

    # The checkpoints that the user named. A missing kernel is an error here.
    named_lengths: dict[str, list[int]] = {}
    runs: dict[Path, Path] = {}
    for folder in map(Path.resolve, sources.checkpoints):
        runs[folder] = folder
        if folder.name == "checkpoints":
            runs[folder] = folder.parent
    names = [run.name for run in runs.values()]
    for folder, run in runs.items():
        label = run.name if names.count(run.name) == 1 else str(run)
        folder = _checkpoint_folder(folder)
        sources.notes += _code_notes(folder)
        adaptive = checkpoint_adaptive_figure(folder, model=label, name=label)
        if adaptive is not None:
            weight_figures.append(adaptive)
            continue
        tables = distance_tables(folder)
        if not tables:
            raise UserError(
                f"{folder}: its positional method is not a function of the distance, so it has no "
                "kernel to plot"
            )
        model = f"{display_name(Method(tables[0].pos_emb))}, {label}"
        weight_figures += distance_figures(tables, model=model, name=label)
        if head_lengths := _effective_lengths(tables):
            named_lengths[model] = head_lengths
    if named_lengths:
        numbers = {label: number for number, label in enumerate(named_lengths)}
        model = "given checkpoints"
        figure = effective_length_figure(named_lengths, numbers, model=model, name="named")
        length_figures.append(figure)


def _code_notes(folder: Path, iteration: int | None = None) -> list[str]:
    """A line if an external method's file has changed since the checkpoint was trained."""
    step = find_step(folder, iteration)
    notice = code_notice(step, checkpoint_config(step))
    if notice is None:
        return []
    return [notice.removeprefix("notice: ")]


def _checkpoint_folder(path: str | Path) -> Path:
    """The folder itself, or the checkpoint that evaluation has made of a Hugging Face folder."""
    if looks_like_checkpoint(path):
        return Path(path)
    return local_checkpoint(path, lambda line: None)


def _effective_lengths(tables: Iterable[DistanceTable]) -> list[int]:
    """The effective lengths of all heads, of all layers if the layers differ."""
    lengths: list[int] = []
    for table in tables:
        if table.effective_lengths is not None:
            lengths += table.effective_lengths.tolist()
    return lengths
