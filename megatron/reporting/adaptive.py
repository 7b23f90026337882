"""DAPE's Figure 1: what one query gives to the keys before it, by its content, by the static bias, and by the MLP.

Legend: b batch, h heads, c queries, l keys, n tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kerple.positional import PositionalMethod, method_class
from kerple.positional.dape import Adaptive
from megatron.checkpoint.configuration import checkpoint_config
from megatron.checkpoint.directory import find_step
from megatron.data.streams import evaluation_tokens
from megatron.inference import load_model
from megatron.model.gpt import GPT
from megatron.reporting.drawing import PaperFigure, new_figure, thousands
from megatron.utils.errors import UserError

HEADS_SHOWN = 3
LONGEST, LONGEST_TIMES = 8192, 16


@dataclass(frozen=True)
class Parts:
    """Of the last query of a text, in one layer, over its keys: `[h, n]` each, float32.

    scores: A, the scaled products. static: B, the static bias; None without one. adapted: f(A, B).
    """

    scores: Tensor
    static: Tensor | None
    adapted: Tensor


@torch.no_grad()
def parts_of(model: GPT, tokens: Tensor, layer: int = 0) -> Parts:
    """A, B and f(A, B) of the last of the int64 tokens `[n]` in that block.

    f is what `modify_scores` adds beyond A, and beyond B where the variant adds that too. Raises UserError for a model whose
    method is not DAPE, and for a block that there is not.
    """
    if not 0 <= layer < len(model.blocks):
        raise UserError(f"layer {layer}: the model has the layers 0 to {len(model.blocks) - 1}")
    method = next((one for one in model.blocks[layer].modules() if isinstance(one, PositionalMethod)), None)
    if method is None or not is_dape(method):
        raise UserError("the positional method is not DAPE, so there is no f(A, B) to draw")
    found: list[Parts] = []
    last = len(tokens) - 1
    modify_scores = method.modify_scores

    def watched(
        scores: Tensor, query: Tensor, queries: Tensor, keys: Tensor, mask: Tensor, table: Tensor | None
    ) -> Tensor:
        # `modify_scores` may write its result over the scores.
        before = scores[0, :, -1].float().clone() if queries[-1] == last else None
        result = modify_scores(scores, query, queries, keys, mask, table)
        if before is not None:
            static = _static(method, scores, queries, keys)
            rest = result[0, :, -1].float() - before
            found.append(Parts(before, static, rest if static is None or method.variant == "Concat" else rest - static))
        return result

    method.modify_scores = watched
    try:
        model.hidden(tokens[None])
    finally:
        del method.modify_scores
    if not found:
        raise UserError(
            "the model's attention does not call its positional method's `modify_scores`; nothing can be drawn"
        )
    return found[0]


def figure_of(directory: str | Path, iteration: int | None = None, *, of: str, name: str) -> PaperFigure | None:
    """The figure of a checkpoint's first layer, on the beginning of the validation text of its own configuration: as
    the paper has it, at position 8192, or at 16 times the training length where that is less; None if its method is not
    DAPE. Raises UserError where the checkpoint, or its text, cannot be read.
    """
    config = checkpoint_config(find_step(directory, iteration))
    if not issubclass(method_class(config.model.pos_emb), Adaptive):
        return None
    model, _ = load_model(directory, iteration)
    length = min(LONGEST, LONGEST_TIMES * config.model.seq_length)
    tokens = torch.from_numpy(evaluation_tokens(config, "valid", length))
    return adaptive_figure(parts_of(model, tokens), of=of, name=name)


def is_dape(method: PositionalMethod) -> bool:
    return isinstance(method, Adaptive)


def _static(method: PositionalMethod, scores: Tensor, queries: Tensor, keys: Tensor) -> Tensor | None:
    """B of the last query, `[h, l]`."""
    if method.static is None:
        return None
    if method.static.has_bias:
        return method.static.bias((queries[-1] - keys).clamp(min=0).to(scores.device, torch.float32)).float()
    return method.static.pair_bias(queries[-1:], keys, scores)[:, 0].float()


def adaptive_figure(parts: Parts, *, of: str, name: str, heads: Sequence[int] | None = None) -> PaperFigure:
    """A row for each of A, B and f(A, B), a column per head."""
    shown = list(heads if heads is not None else range(min(HEADS_SHOWN, len(parts.scores))))
    rows = [("A: attention", parts.scores), ("B: static bias", parts.static), ("f(A, B): DAPE's", parts.adapted)]
    rows = [(label, values) for label, values in rows if values is not None]
    figure, axes = new_figure(len(rows), len(shown), width=9.6, height=1.9 * len(rows) + 0.4, sharex=True)
    length = parts.scores.shape[-1]
    for place, one in enumerate(axes):
        (label, values), head = rows[place // len(shown)], shown[place % len(shown)]
        one.plot(range(length), values[head].cpu().numpy(), color="#0072B2", linewidth=0.7, rasterized=length > 4096)
        one.set_xlim(0, max(1, length - 1))
        one.tick_params(labelsize=8)
        one.locator_params(axis="x", nbins=4)
        thousands(one)
        if place % len(shown) == 0:
            one.set_ylabel(label, fontsize=9)
        if place < len(shown):
            one.set_title(f"head {head}", loc="left", fontsize=9)
    figure.supxlabel("position of the key (tokens)", fontsize=9)
    figure.align_ylabels()
    return PaperFigure(
        f"adaptive-{name}",
        f"Scores and biases of one query: {of}",
        f"What the query at position {length - 1:,} gives to the keys before it (DAPE, Figure 1): A, the scaled "
        "product of query and key; B, the static bias; f(A, B), what the MLP adds.",
        f"{', '.join(label for label, _ in rows)}, over {length:,} keys, for heads {', '.join(map(str, shown))}.",
        figure,
    )
