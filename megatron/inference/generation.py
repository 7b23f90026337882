"""Text generation in batches, with a KV cache or by recomputing the prefix; both give the same
tokens.

All rows of a batch start at position 0 and have the same number of tokens, whatever the length of
their prompts: each step feeds one token per row, and a row that is still within its prompt takes
its next token from there instead of sampling it. So there is no padding, and a row's result does
not depend on the other rows, except in modes that depend on the length (`linear` and
`dynamic-ntk`): it is that of the longest text. Each row samples from its own random stream.

Legend: b batch, v vocabulary.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kerple.attention import DEFAULT_MODE, AttentionMode
from kerple.positional import PositionsExceeded
from megatron.inference.decoder import Decoder, NativeDecoder, as_decoder, inference, model_device
from megatron.utils.errors import UserError

PROMPT_CHUNK = 512
# A cache for more tokens is not allocated at once: texts usually end earlier.
_ALLOCATED_TOKENS = 1 << 16


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from logits.

    Attributes:
        temperature: divides the logits. As in GPT-NeoX, 0 chooses the most probable token (greedy)
            if top_k and top_p are 0, and is 1 otherwise.
        top_k: sample from the k most probable tokens; 0: from all.
        top_p: then sample from the smallest set of tokens whose total probability is at least top_p
            (nucleus sampling, Holtzman et al. 2020); 0 and 1: from all.
        vocab_size: ids at and above it pad the vocabulary and are never chosen; None: there is no
            padding.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 0.0
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise UserError(f"temperature must be 0 or more, not {self.temperature}")
        if self.top_k < 0:
            raise UserError(f"top_k must be 0 (off) or more, not {self.top_k}")
        if not 0 <= self.top_p <= 1:
            raise UserError(f"top_p must be between 0 (off) and 1, not {self.top_p}")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise UserError(f"vocab_size must be at least 1, not {self.vocab_size}")

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is chosen."""
        return self.temperature == self.top_k == self.top_p == 0

    def probabilities(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Float64 probabilities `[b, k]` of the remaining tokens and their ids `[b, k]`, from
        logits `[b, v]`, unless the choice is greedy.
        """
        logits = logits[:, : self.vocab_size].double()
        nucleus = 0 < self.top_p < 1
        # Sorting a large vocabulary is the slowest part, so do it only if needed.
        if 0 < self.top_k < logits.shape[1]:
            logits, ids = logits.topk(self.top_k)
        elif nucleus:
            logits, ids = logits.sort(descending=True)
        else:
            ids = torch.arange(logits.shape[1], device=logits.device).expand_as(logits)

        # Subtract the largest logit first, so that a very small temperature does not overflow.
        scaled = (logits - logits.amax(dim=-1, keepdim=True)) / (self.temperature or 1.0)
        probabilities = scaled.softmax(dim=-1)  # [b, k]
        if nucleus:
            before = probabilities.cumsum(dim=-1) - probabilities
            probabilities = probabilities.masked_fill(before >= self.top_p, 0.0)
            probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
        return probabilities, ids

    def choose(self, logits: Tensor, generators: Sequence[np.random.Generator]) -> list[int]:
        """One token id per row of logits `[b, v]`. Each row draws one number from its own
        generator. Raises UserError if a logit is NaN or the largest one is infinite.
        """
        known = logits[:, : self.vocab_size]
        if not known.amax(dim=-1).isfinite().all():
            raise UserError(
                "the model's logits are NaN or infinite: the checkpoint is damaged, or its values "
                "overflow"
            )
        if self.is_greedy:
            greedy: list[int] = known.argmax(dim=-1).tolist()
            return greedy
        probabilities, ids = self.probabilities(logits)  # [b, k]
        numbers = [generator.random() for generator in generators]
        draws = torch.tensor(numbers, dtype=torch.float64, device=logits.device)  # [b]

        # Inverse of the cumulative distribution. If rounding leaves its end below 1, the last
        # possible token is chosen.
        chosen = (probabilities.cumsum(dim=-1) <= draws[:, None]).sum(dim=-1)
        indices = torch.arange(probabilities.shape[1], device=probabilities.device)
        last = torch.where(probabilities > 0, indices, 0).amax(dim=-1)
        sampled: list[int] = ids.gather(1, torch.minimum(chosen, last)[:, None])[:, 0].tolist()
        return sampled


@dataclass(frozen=True)
class Generation:
    """The text generated for one prompt.

    Attributes:
        tokens: the new tokens, without a final end-of-document token.
        finished: whether the text ended with end-of-document. Otherwise it was cut off, by
            `maximum_tokens` or for the reason in `message`.
        duration_seconds: from the start of its batch to its last token.
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
    vocab_size: int | None = None,
    batch_size: int = 32,
    recompute: bool = False,
    mode: AttentionMode = DEFAULT_MODE,
    on_generation: Callable[[int, Generation], None] | None = None,
) -> list[Generation]:
    """Continue each prompt by at most `maximum_tokens` tokens; returns the results in the order of
    the prompts.

    Only the positional method limits the length: rows that reach the end of a `learned` table stop
    with a message.

    Args:
        model: a model of this project; with `recompute` also any callable from int64 tokens
            `[b, s]` to logits `[b, s, v]`.
        prompts: token ids, at least one each (for an empty prompt, the end-of-document token).
        temperature, top_k, top_p: see `Sampling`.
        seed: row i samples from a random stream of (seed, i), independent of the other rows.
        eod: the end-of-document token. A row that generates it is finished; None: no token ends a
            row.
        vocab_size: ids at and above it, which pad the vocabulary, are never sampled, and rejected
            in prompts.
        batch_size: largest number of rows computed at once.
        recompute: recompute the whole prefix for each token instead of using a cache.
        mode: how the model attends, for texts of the longest prompt and `maximum_tokens` more. With
            a window (and sinks), the cache keeps only the tokens that later queries attend to.
        on_generation: called with a prompt's index and result as soon as it is complete.

    Raises:
        UserError: for invalid arguments, a mode that the model does not support, or a model without
            a KV cache if `recompute` is False.
    """
    # Arguments and prompts.
    sampling = Sampling(temperature, top_k, top_p, vocab_size)
    for name, value in (("maximum_tokens", maximum_tokens), ("batch_size", batch_size)):
        if value < 1:
            raise UserError(f"{name} must be at least 1, not {value}")
    if seed < 0:
        raise UserError(f"seed must be 0 or more, not {seed}")
    decoder = as_decoder(model)
    sizes = [size for size in (vocab_size, decoder.vocab_size) if size is not None]
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise UserError(
                f"prompt {index} is empty: to generate without a prompt, pass the end-of-document "
                "token"
            )
        lowest, highest = min(prompt), max(prompt)
        invalid = lowest if lowest < 0 else highest
        if invalid < 0 or invalid >= min(sizes, default=math.inf):
            raise UserError(
                f"prompt {index} contains token id {invalid}, which is outside the vocabulary"
            )

    # What the model supports.
    if not recompute and not isinstance(decoder, NativeDecoder):
        raise UserError(
            f"{type(model).__name__} is not a model of this project, so its KV cache cannot be "
            "used: generate with recompute"
        )
    if not recompute and not decoder.cached:
        raise UserError(
            f"pos_emb {decoder.pos_emb}: its angles change with the length of the text, so keys "
            "cannot be cached: generate with recompute"
        )
    reason = decoder.unsupported_reason(mode)
    if reason is not None:
        raise UserError(f"the inference mode {reason}")

    # The order of batches may differ from that of the prompts.
    mode = mode.at_length(max(map(len, prompts), default=0) + maximum_tokens)
    results: dict[int, Generation] = {}
    with inference(model):
        for indices in _batches(prompts, batch_size, maximum_tokens):
            rows = []
            for index in indices:
                generator = np.random.default_rng([seed, index])
                rows.append(_Row(index, list(prompts[index]), generator))
            finished = _continue(
                decoder, model_device(model), rows, sampling, maximum_tokens, eod, recompute, mode
            )
            for index, generation in finished:
                results[index] = generation
                if on_generation is not None:
                    on_generation(index, generation)
    return [results[index] for index in range(len(prompts))]


class _Row:
    """A prompt that is being continued. `text` is the prompt and the tokens generated so far."""

    def __init__(self, index: int, prompt: list[int], generator: np.random.Generator):
        self.index = index
        self.prompt = prompt
        self.text = list(prompt)
        self.generator = generator

    @property
    def generated(self) -> list[int]:
        return self.text[len(self.prompt) :]


def _batches(
    prompts: Sequence[Sequence[int]], batch_size: int, maximum_tokens: int
) -> Iterator[list[int]]:
    """Indices of prompts of similar length. A batch needs one more step per token by which its
    longest prompt exceeds its shortest; this is limited to the number of generated tokens.
    """
    batch: list[int] = []
    for index in sorted(range(len(prompts)), key=lambda index: len(prompts[index])):
        if batch:
            longer_by = len(prompts[index]) - len(prompts[batch[0]])
            if len(batch) == batch_size or longer_by > maximum_tokens:
                yield batch
                batch = []
        batch.append(index)
    if batch:
        yield batch


def _continue(
    decoder: Decoder,
    device: torch.device,
    rows: list[_Row],
    sampling: Sampling,
    maximum_tokens: int,
    eod: int | None,
    recompute: bool,
    mode: AttentionMode,
) -> Iterator[tuple[int, Generation]]:
    """Continue the rows of one batch. Yields (index, result) when a row is complete."""
    start = time.perf_counter()

    def result(
        row: _Row, *, finished: bool = False, message: str | None = None
    ) -> tuple[int, Generation]:
        tokens = row.generated[:-1] if finished else row.generated
        seconds = time.perf_counter() - start
        return row.index, Generation(row.prompt, tokens, finished, message, seconds)

    # The KV cache, and the tokens in it. The last generated token is never fed. A long cache grows.
    cache, cached = None, 0
    if not recompute:
        max_length = max(len(row.prompt) for row in rows) + maximum_tokens - 1
        allocated = max_length if max_length <= _ALLOCATED_TOKENS else None
        cache = decoder.new_cache(allocated, mode)

    # Each step appends one token to the rows that are not within their prompts.
    while rows:
        length = min(len(row.text) for row in rows)
        texts = [row.text[cached:length] for row in rows]
        tokens = torch.tensor(texts, device=device)  # [b, s]
        try:
            if cache is None:
                hidden = decoder.hidden(tokens, None, mode)  # [b, s, e]
            else:
                for chunk in tokens.split(PROMPT_CHUNK, dim=1):
                    hidden = decoder.hidden(chunk, cache, mode)
                cached = length
            logits = decoder.logits(hidden[:, -1])  # [b, v]
        except PositionsExceeded as exceeded:
            # Every row has at least `length` tokens, so none can continue.
            yield from (result(row, message=str(exceeded)) for row in rows)
            return
        sampled = [index for index, row in enumerate(rows) if len(row.text) == length]
        generators = [rows[index].generator for index in sampled]
        chosen = sampling.choose(logits[sampled], generators)
        for index, token in zip(sampled, chosen, strict=True):
            rows[index].text.append(token)

        # Rows that are complete leave the batch.
        remaining = []
        for index, row in enumerate(rows):
            count = len(row.text) - len(row.prompt)
            if count > 0 and row.text[-1] == eod:
                yield result(row, finished=True)
            elif count == maximum_tokens:
                yield result(row)
            else:
                remaining.append(index)
        if len(remaining) < len(rows):
            if cache is not None and remaining:
                cache.select(torch.tensor(remaining, device=device))
            rows = [rows[index] for index in remaining]
