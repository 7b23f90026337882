"""Figures of KERPLE: 2-4 kernels per head, 5 and 7 perplexity by position, 6 effective lengths.

Legend: h heads, n distances.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, SymmetricalLogLocator
from torch import Tensor

from megatron.evaluation.measures.effective_length import LIMIT
from megatron.reporting.drawing import (
    COLORS as COLORS,
)
from megatron.reporting.drawing import (
    GREY,
    PaperFigure,
    head_styles,
    method_style,
    mode_style,
    new_figure,
    outside_legend,
    thousands,
)
from megatron.reporting.drawing import (
    LINE_STYLES as LINE_STYLES,
)
from megatron.reporting.kernels import Kernel
from megatron.reporting.published import display_name, published
from megatron.reporting.results import Method, Setting, in_order, method_of, setting_of
from megatron.reporting.tables import CORPORA
from megatron.utils.errors import UserError

# exp of it is what the softmax sees of a key whose bias it is: below, next to nothing.
LOWEST_OF_INTEREST = -10.0
LAYERS_SHOWN = 12


def kernel_figures(kernels: Sequence[Kernel], *, of: str, name: str) -> list[PaperFigure]:
    """Figures 2-4: bias, and weight, of every head over distance; a panel per layer where each has its own.

    of: which model, for the titles; name: for the files.
    """
    figures = []
    for hook, log_name in (("bias", "bias"), ("weight", "weight of the scores")):
        shown = [kernel for kernel in kernels if getattr(kernel, hook) is not None][:LAYERS_SHOWN]
        if not shown:
            continue
        draw = _shared_kernel if len(shown) == 1 else _kernels_by_layer
        figure = draw(shown, hook)
        caption = (
            f"The {log_name} of every head over distance (KERPLE, Figures 2 to 4), dark to light from the head that "
            "falls fastest to the flattest."
        )
        if len(shown) == 1:
            caption += " Right: the same on a logarithmic distance"
            caption += f", down to {LOWEST_OF_INTEREST:g}: what the softmax sees." if hook == "bias" else "."
        left_out = len(kernels) - len(shown)
        if left_out > 0 and len(shown) == LAYERS_SHOWN:
            caption += f" The first {LAYERS_SHOWN} of {len(kernels)} layers."
        heads = len(getattr(shown[0], hook))
        figures.append(
            PaperFigure(
                f"kernels-{name}-{hook}",
                f"{hook.capitalize()} over distance: {of}",
                caption,
                f"Lines of the {log_name} over distance, one for each of {heads} heads.",
                figure,
            )
        )
    return figures


def _order(values: Tensor) -> list[int]:
    """Heads `[h, n]` from the one that falls fastest to the flattest."""
    return values.double().mean(dim=1).argsort(stable=True).tolist()


def _shared_kernel(kernels: Sequence[Kernel], hook: str):
    kernel = kernels[0]
    values = getattr(kernel, hook)
    figure, axes = new_figure(1, 2, width=9.6, height=4.2)
    for one in axes:
        _heads(one, kernel, values)
    axes[0].set_ylabel(hook)
    axes[1].set_xscale("symlog", linthresh=1)
    axes[1].xaxis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=1))
    thousands(axes[1])
    if hook == "bias":
        axes[1].set_ylim(LOWEST_OF_INTEREST, 0.02 * -LOWEST_OF_INTEREST)
    outside_legend(figure, axes[0], columns=1 + (len(values) > 16))
    return figure


def _kernels_by_layer(kernels: Sequence[Kernel], hook: str):
    columns = min(4, len(kernels))
    rows = math.ceil(len(kernels) / columns)
    figure, axes = new_figure(rows, columns, width=9.6, height=2.4 * rows + 0.4, sharex=True)
    for one, kernel in zip(axes, kernels, strict=False):
        _heads(one, kernel, getattr(kernel, hook))
        one.set_title(kernel.place, loc="left", fontsize=9)
        one.set_xlabel("")
        one.tick_params(labelsize=7.5)
    for one in axes[len(kernels) :]:
        one.set_visible(False)
    figure.supxlabel("distance (tokens)", fontsize=10)
    figure.supylabel(hook, fontsize=10)
    return figure


def _heads(axes: Axes, kernel: Kernel, values: Tensor) -> None:
    styles = head_styles(_order(values))
    for head in styles:
        axes.plot(kernel.distances.numpy(), values[head].double().numpy(), label=f"head {head}", **styles[head])
    axes.set_xlabel("distance (tokens)")
    axes.set_xlim(0, float(kernel.distances[-1]))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4))
    thousands(axes)


def effective_length_figure(
    lengths: Mapping[str, Sequence[int]], *, of: str, name: str, limit: int = LIMIT
) -> PaperFigure:
    """Figure 6: how many heads have an effective length up to a distance. `lengths`: label -> one per head (of all
    layers, where each has its own); `limit` stands for a head whose bias never falls below the threshold.
    """
    figure, (axes,) = new_figure()
    for index, (label, found) in enumerate(lengths.items()):
        distances, counts = cumulative(found, limit)
        style = {**method_style(index), "marker": None}
        axes.step(distances, counts, where="post", label=label, **style)
    axes.set_xscale("symlog", linthresh=1)
    axes.xaxis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=1))
    axes.set_xlim(0, limit)
    axes.set_ylim(0, max(map(len, lengths.values())) * 1.04)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("effective length (tokens)")
    axes.set_ylabel("heads up to it")
    thousands(axes)
    outside_legend(figure, axes)
    return PaperFigure(
        f"effective-lengths-{name}",
        f"Effective lengths: {of}",
        "How many heads have an effective length of at most so many tokens (KERPLE, Figure 6); a head's effective "
        "length is the smallest distance whose bias is below -2. Where a line ends below the number of heads, the "
        f"others see further than {limit:,} tokens.",
        "; ".join(
            f"{label}: {sum(one < limit for one in found)} of {len(found)} heads end before {limit:,}"
            for label, found in lengths.items()
        ),
        figure,
    )


def cumulative(lengths: Sequence[int], limit: int = LIMIT) -> tuple[np.ndarray, np.ndarray]:
    """(distances, heads whose effective length is at most that): the corners of a step function from 0 to `limit`."""
    ends = np.sort(np.array([one for one in lengths if one < limit], dtype=np.int64))
    distances = np.concatenate([[0], ends, [limit]])
    counts = np.concatenate([[0], np.arange(1, len(ends) + 1), [len(ends)]])
    return distances, counts


def position_figures(records: Sequence[Mapping[str, Any]]) -> list[PaperFigure]:
    """Figures 5 and 7: perplexity by position, a figure per corpus, training length and length of the text."""
    found: dict[tuple[Setting, int], dict[Method, list[tuple[list[float], list[float]]]]] = {}
    for record in records:
        if record["kind"] == "positions":
            key = setting_of(record), record["length"]
            curves = found.setdefault(key, {}).setdefault(method_of(record), [])
            curves.append((record["edges"], record["losses"]))
    return [_positions(setting, length, curves) for (setting, length), curves in found.items()]


def _positions(setting: Setting, length: int, curves: Mapping[Method, list]) -> PaperFigure:
    corpus = CORPORA.get(setting.corpus.lower(), setting.corpus)
    figure, (axes,) = new_figure(height=4.8)
    methods = in_order(list(curves), published("kerple-3").methods)
    pos_embs = list(dict.fromkeys(pos_emb for pos_emb, _ in methods))
    modes = sorted(dict.fromkeys(mode for _, mode in methods), key=lambda mode: (mode != "full", mode))
    lowest, highest = [], []
    for method in methods:
        middles, perplexities = mean_curve(curves[method])
        style = method_style(pos_embs.index(method[0]))
        style |= {"markevery": 0.1, "markersize": 5}
        if len(modes) > 1:  # the method is told by colour and marker, the mode by line and filling
            style |= mode_style(modes.index(method[1]))
        if method[1] != "full":
            style |= {"markerfacecolor": "white", "markeredgecolor": style["color"]}
        axes.plot(middles, perplexities, label=display_name(method), **style)
        kept = [one for one in perplexities if math.isfinite(one)]
        lowest += [min(kept)] if kept else []
        highest += [statistics.median(kept)] if kept else []
    if lowest and max(highest) > 4 * min(lowest):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylabel("perplexity (logarithmic axis)")
    else:
        axes.set_ylabel("perplexity")
    thousands(axes, "y")
    thousands(axes)
    axes.set_xlim(0, length)
    axes.set_xlabel("position in the text (tokens)")
    if setting.train_length and setting.train_length < length:
        axes.axvline(setting.train_length, color="#888888", linewidth=1, linestyle=(0, (2, 2)), zorder=1)
        axes.annotate(
            "training length",
            (setting.train_length, 1),
            xycoords=("data", "axes fraction"),
            xytext=(4, -2),
            textcoords="offset points",
            fontsize=8.5,
            color=GREY,
            va="top",
        )
    outside_legend(figure, axes)
    seeds = max(map(len, curves.values()))
    return PaperFigure(
        f"positions-{setting.name}-{length}",
        f"Perplexity by position at length {length:,}: {corpus}",
        f"Perplexity by position in texts of {length:,} tokens, protocol {setting.protocol} (KERPLE, Figures 5 and 7)"
        + (f", mean over {seeds} seeds." if seeds > 1 else ".")
        + " Hollow marks: an inference mode other than full.",
        "Lines of the perplexity over the position for " + ", ".join(display_name(method) for method in methods) + ".",
        figure,
    )


def mean_curve(curves: Sequence[tuple[Sequence[float], Sequence[float]]]) -> tuple[list[float], list[float]]:
    """(middles of the bins, perplexity there): exp of each seed's loss, the mean over the seeds. `curves`: (edges,
    losses), the edges one more than the losses. Raises UserError where the seeds were counted in different bins.
    """
    edges, _ = curves[0]
    if any(list(others) != list(edges) for others, _ in curves):
        raise UserError("losses by position: the seeds of one method have different bins; evaluate them alike")
    middles = [(first + last) / 2 for first, last in itertools.pairwise(edges)]
    perplexities = []
    for losses in zip(*(losses for _, losses in curves), strict=True):
        values = [math.exp(min(loss, 700.0)) for loss in losses if loss is not None]
        perplexities.append(statistics.fmean(values) if values else math.nan)
    return middles, perplexities
