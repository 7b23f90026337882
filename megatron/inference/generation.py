"""Text generation in batches, with a key-value cache or by recomputing the prefix; both give the same tokens.

Rows of a batch all begin at position 0 and hold equally many tokens, whatever the lengths of their prompts: each step
feeds the tokens that every row already knows, and where a row's prompt goes on beyond that, its next token is the
prompt's, not a drawn one. So no row ever sees padding, and every positional method gives what it gives to the row
alone. Each row draws from its own random stream.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kerple.positional import PositionsExceeded
from megatron.inference.decoder import Decoder, as_decoder, inference, model_device
from megatron.inference.sampling import Sampling
from megatron.utils.errors import UserError

PROMPT_CHUNK = 512


@dataclass(frozen=True)
class Generation:
    """What was generated for one prompt.

    tokens: the new tokens, without the end-of-document token that ended them.
    finished: the text came to its end (end-of-document); False: it was cut, by `maximum_tokens` or for the reason in
        `message`.
    duration_seconds: from the beginning of its batch to its last token.
    """

    prompt: list[int]
    tokens: list[int]
    finished: bool
    message: str | None
    duration_seconds: float


def generate(
    model: Callable[[Tensor], Any],
    prompts: Sequence[Sequence[int]],
    *,
    maximum_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 0.0,
    seed: int = 1234,
    eod: int | None = None,
    stop_at_eod: bool = True,
    vocab_size: int | None = None,
    batch_size: int = 32,
    recompute: bool = False,
    ended: Callable[[list[int]], bool] | None = None,
    on_generation: Callable[[int, Generation], None] | None = None,
) -> list[Generation]:
    """Continue each prompt by at most `maximum_tokens` tokens; the results are in the order of the prompts.

    model: a model of this project; with `recompute` also any callable from int64 tokens `[b, s]` to logits `[b, s, v]`.
    prompts: token ids, at least one each (a text from nothing begins with the end-of-document token).
    temperature, top_k, top_p: see `Sampling`; temperature 0 is greedy.
    seed: row i draws from a stream of its own, made of the seed and i, whatever rows stand beside it.
    eod: the end-of-document token; a row that generates it is finished, unless `stop_at_eod` is False.
    vocab_size: ids from it on, the padding of the vocabulary, are never drawn, and refused in prompts.
    batch_size: rows computed at once, at most.
    recompute: compute the whole prefix again for each token, without a cache.
    ended: given the new tokens of a row after each of them, whether the row ends there; for texts that stop at a word.
    on_generation: called with the index of a prompt and its result as soon as that is known.

    Nothing limits the length but the positional method: where `learned` meets the end of its table, the rows concerned
    stop with a message. Raises UserError for arguments that cannot be served.
    """
    sampling = Sampling(temperature, top_k, top_p, vocab_size)
    _check(prompts, vocab_size, {"maximum_tokens": maximum_tokens, "batch_size": batch_size}, seed)
    decoder = as_decoder(model)
    if not recompute and not hasattr(model, "new_cache"):
        raise UserError(f"{type(model).__name__} has no key-value cache of this project: generate with recompute")
    stop = eod if stop_at_eod else None
    results: dict[int, Generation] = {}
    with inference(model):
        for members in _batches(prompts, batch_size, maximum_tokens):
            rows = [_Row(index, list(prompts[index]), np.random.default_rng([seed, index])) for index in members]
            source = _Logits(decoder, rows, maximum_tokens, model_device(model), recompute)
            for index, generation in _continue(source, rows, sampling, maximum_tokens, stop, ended):
                results[index] = generation
                if on_generation is not None:
                    on_generation(index, generation)
    return [results[index] for index in range(len(prompts))]


class _Row:
    """A prompt being continued: `text` is the prompt and what was generated so far."""

    def __init__(self, index: int, prompt: list[int], generator: np.random.Generator):
        self.index = index
        self.prompt = prompt
        self.text = list(prompt)
        self.generator = generator

    def generated(self) -> list[int]:
        return self.text[len(self.prompt) :]


def _check(prompts: Sequence[Sequence[int]], vocab_size: int | None, counts: dict[str, int], seed: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise UserError(f"{name} must be at least 1, not {value}")
    if seed < 0:
        raise UserError(f"seed must be 0 or more, not {seed}")
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise UserError(f"prompt {index} is empty: a text from nothing begins with the end-of-document token")
        if min(prompt) < 0 or (vocab_size is not None and max(prompt) >= vocab_size):
            wrong = min(prompt) if min(prompt) < 0 else max(prompt)
            raise UserError(f"prompt {index} holds token id {wrong}, which is outside the vocabulary")


def _batches(prompts: Sequence[Sequence[int]], batch_size: int, maximum_tokens: int) -> Iterator[list[int]]:
    """Indices of prompts of similar length. A longer prompt costs its batch one step per token beyond the shortest, so
    the lengths of a batch differ by no more than the number of steps it takes anyway."""
    batch: list[int] = []
    for index in sorted(range(len(prompts)), key=lambda index: len(prompts[index])):
        if batch and (len(batch) == batch_size or len(prompts[index]) - len(prompts[batch[0]]) > maximum_tokens):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _continue(
    source: "_Logits",
    rows: list[_Row],
    sampling: Sampling,
    maximum_tokens: int,
    stop: int | None,
    ended: Callable[[list[int]], bool] | None,
) -> Iterator[tuple[int, Generation]]:
    """Continue the rows of one batch; each is given out when it ends."""
    begun = time.perf_counter()

    def result(row: _Row, *, finished: bool = False, message: str | None = None) -> tuple[int, Generation]:
        tokens = row.generated()[:-1] if finished else row.generated()
        return row.index, Generation(row.prompt, tokens, finished, message, time.perf_counter() - begun)

    while rows:
        known = min(len(row.text) for row in rows)
        try:
            logits = source.after(rows, known)
        except PositionsExceeded as exceeded:
            # Every row holds at least `known` tokens, so none of them can go on.
            yield from (result(row, message=str(exceeded)) for row in rows)
            return
        drawn = [index for index, row in enumerate(rows) if len(row.text) == known]
        for index, token in zip(drawn, sampling.choose(logits[drawn], [rows[i].generator for i in drawn]), strict=True):
            rows[index].text.append(token)
        remaining = []
        for index, row in enumerate(rows):
            generated = len(row.text) - len(row.prompt)
            if generated > 0 and row.text[-1] == stop:
                yield result(row, finished=True)
            elif generated == maximum_tokens or (generated > 0 and ended is not None and ended(row.generated())):
                yield result(row)
            else:
                remaining.append(index)
        if len(remaining) < len(rows):
            source.keep(remaining)
            rows = [rows[index] for index in remaining]


class _Logits:
    """The logits that follow the first `known` tokens of every row, through the cache or anew each time."""

    def __init__(self, decoder: Decoder, rows: list[_Row], maximum_tokens: int, device: torch.device, recompute: bool):
        self._decoder = decoder
        self._device = device
        # The last token that is drawn is never fed.
        longest = max(len(row.prompt) for row in rows) + maximum_tokens - 1
        self._cache = None if recompute else decoder.new_cache(len(rows), longest)
        self._held = 0

    def after(self, rows: list[_Row], known: int) -> Tensor:
        """`[b, v]`."""
        text = torch.tensor([row.text[self._held : known] for row in rows], device=self._device)
        if self._cache is None:
            return self._decoder.logits(self._decoder.hidden(text)[:, -1])
        for chunk in text.split(PROMPT_CHUNK, dim=1):
            hidden = self._decoder.hidden(chunk, self._cache)
        self._held = known
        return self._decoder.logits(hidden[:, -1])

    def keep(self, remaining: list[int]) -> None:
        """Forget the rows that ended."""
        if self._cache is not None and remaining:
            self._cache.select(torch.tensor(remaining, device=self._device))
