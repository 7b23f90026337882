"""Perplexity against length: how a language model fares on texts longer than those it was trained on."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.config.errors import UserError
from megatron.evaluation.modes import Mode, parse_mode
from megatron.evaluation.progress import Progress
from megatron.evaluation.protocols import Segments, plan
from megatron.evaluation.rows import Row, make_row
from megatron.evaluation.scoring import score
from megatron.inference.decoder import Decoder, as_decoder, inference, model_device
from megatron.model.positional import PositionsExceeded

QUERY_CHUNK = 512
# A processor's caches hold no more at once; a GPU is idle with less.
BATCH_TOKENS_CPU, BATCH_TOKENS_GPU = 8192, 32768


def evaluate_extrapolation(
    model: Callable[[Tensor], Any],
    tokens: Tensor | np.ndarray | Sequence[int],
    lengths: Sequence[int],
    *,
    modes: Sequence[str] = ("full",),
    protocol: str = "non-overlapping",
    token_budget: int | None = None,
    query_chunk: int = QUERY_CHUNK,
    batch_tokens: int | None = None,
    vocab_size: int | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
    pos_emb: str | None = None,
    seed: int | None = None,
    train_length: int | None = None,
    on_row: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Loss and perplexity of a token stream, read in segments of each of the given lengths.

    model: any callable from int64 tokens `[b, s]` to logits `[b, s, v]` (or an object that holds them as `.logits`). A
        model of this project, or one of transformers, is fed in chunks through its key-value cache, so that memory
        grows linearly with the length.
    tokens: int64 `[n]`, the text. It is validation text: the first token is context only, the next ones are the
        targets.
    lengths: segment lengths in tokens. Those that divide the longest make the best use of the text.
    modes: `full`, `window@W`, `blockwise`, `blockwise@L`; see `megatron.evaluation.modes`.
    protocol: `non-overlapping`; see `megatron.evaluation.protocols`.
    token_budget: score at most so many tokens, the same ones at every length; None: as many as there are.
    query_chunk: queries computed at once within a segment, for a model that has a cache.
    batch_tokens: short segments are computed together, up to so many tokens; by default 8,192 on a CPU and 32,768 on a
        GPU. What this and `query_chunk` change is memory and speed.
    vocab_size: refuse token ids from it on before anything is computed.
    device: where batches are sent; by default where the model's first parameter is. The model itself stays where it is.
    progress: a bar with tokens/s and time left on the standard error stream, one line per row where that is no
        terminal.
    pos_emb, seed, train_length: copied into the rows; `blockwise` takes its blocks from train_length.
    on_row: called with each row as soon as it is known.

    Returns one row per mode and length, in that order. The loss is accumulated in float64. A length that the positional
    method does not know (`learned` beyond its table) gives a row without a loss, with a note. Raises UserError for
    arguments that cannot be served.
    """
    stream = _stream(tokens, vocab_size)
    for name, value in (("query_chunk", query_chunk), ("batch_tokens", batch_tokens), ("token_budget", token_budget)):
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, not {value}")
    segments = plan(protocol, len(stream), _lengths(lengths), token_budget)
    decoder = as_decoder(model)
    wanted = [parse_mode(name, train_length) for name in dict.fromkeys(modes)]
    for mode in wanted:
        if not decoder.serves(mode.span):
            needed = "window" if mode.span.block is None else "block"
            raise UserError(
                f"inference mode {mode.name} needs a model with a `{needed}` argument; {_name(model)} has none"
            )
    device = model_device(model) if device is None else torch.device(device)
    if batch_tokens is None:
        batch_tokens = BATCH_TOKENS_CPU if device.type == "cpu" else BATCH_TOKENS_GPU
    sizes = {"query_chunk": query_chunk, "batch_tokens": batch_tokens}
    work = [(mode, part) for mode in wanted for part in segments]
    rows = []
    with inference(model), Progress(pos_emb or _name(model), work, enabled=progress) as bar:
        for mode, part in work:
            bar.start(mode, part)
            loss, note = _mean_loss(decoder, stream, part, mode, device, bar, **sizes)
            row = make_row(
                part,
                loss,
                note,
                mode=mode.name,
                protocol=protocol,
                pos_emb=pos_emb,
                seed=seed,
                train_length=train_length,
            )
            bar.finish(row)
            rows.append(row)
            if on_row is not None:
                on_row(row)
    return rows


def _mean_loss(
    decoder: Decoder, stream: Tensor, segments: Segments, mode: Mode, device: torch.device, bar: Progress, **sizes: int
) -> tuple[float | None, str | None]:
    """The mean loss in nats, or None and the reason."""
    # On a GPU the sum stays there until the end, so that it need not be waited for.
    total = torch.zeros((), dtype=torch.float64, device=device)
    try:
        for scored in score(decoder, stream, segments, span=mode.span, device=device, **sizes):
            total += scored.losses.sum(dtype=torch.float64)
            bar.advance(scored.losses.numel())
    except PositionsExceeded as exceeded:
        return None, str(exceeded)
    return total.item() / segments.targets, None


def _stream(tokens: Tensor | np.ndarray | Sequence[int], vocab_size: int | None) -> Tensor:
    """The token stream as int64 `[n]` on the CPU, its ids checked."""
    stream = torch.as_tensor(tokens)
    if stream.dim() != 1 or stream.is_floating_point() or stream.is_complex() or stream.dtype == torch.bool:
        raise UserError(f"tokens must be a vector of integers, not {stream.dtype} of shape {tuple(stream.shape)}")
    stream = stream.to("cpu", torch.int64)
    if len(stream):
        low, high = (extreme.item() for extreme in torch.aminmax(stream))
        if low < 0 or (vocab_size is not None and high >= vocab_size):
            wrong = low if low < 0 else high
            limit = f" of {vocab_size:,}" if vocab_size is not None else ""
            raise UserError(
                f"token id {wrong} is outside the vocabulary{limit}: the text was made with another tokenizer"
            )
    return stream


def _lengths(lengths: Sequence[int]) -> list[int]:
    unique = list(dict.fromkeys(int(length) for length in lengths))
    if not unique:
        raise UserError("no lengths to evaluate were given")
    if min(unique) < 1:
        raise UserError(f"a length must be at least 1 token, not {min(unique)}")
    return unique


def _name(model: Any) -> str:
    return getattr(model, "__name__", type(model).__name__)
