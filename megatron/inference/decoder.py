"""One view of every causal language model, for evaluation and generation.

A decoder turns tokens into hidden states and hidden states into logits, so that the logits, the widest tensor of a
language model, can be computed for a few positions at a time. What it can do beyond that it declares: `cached` (a
key-value cache, so that a long text is fed in chunks) and `serves` (which spans of keys a query may be given).

Legend: b batch, s new tokens, e hidden size, v padded vocabulary.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kerple.attention import FULL, Span
from kerple.positional import PositionsExceeded


class Decoder(Protocol):
    """What evaluation and generation ask of a model."""

    cached: bool

    def new_cache(self, batch_size: int, max_length: int) -> Any:
        """An empty cache for `batch_size` rows of at most `max_length` tokens; None where `cached` is False."""

    def serves(self, span: Span) -> bool:
        """Whether `hidden` takes this span."""

    def hidden(self, tokens: Tensor, cache: Any = None, span: Span = FULL) -> Tensor:
        """int64 `[b, s]`, the tokens that follow those in the cache -> `[b, s, e]`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., e]` -> `[..., v]`."""


def as_decoder(model: Callable[[Tensor], Any]) -> Decoder:
    """The decoder of a model of this project, of a transformers model, or of any callable int64 `[b, s]` -> logits `[b,
    s, v]` (or an object that holds them as `.logits`)."""
    if all(hasattr(model, name) for name in ("new_cache", "hidden", "logits")):
        return NativeDecoder(model)
    transformers = sys.modules.get("transformers")  # a model of that library can only be here if it has been imported
    if transformers is not None and isinstance(model, transformers.PreTrainedModel):
        return TransformersDecoder(model)
    return CallableDecoder(model)


class NativeDecoder:
    """A model of this project: `hidden(tokens, cache, span)`, `logits(hidden)`, `new_cache(batch_size,
    max_length)`.
    """

    cached = True

    def __init__(self, model: nn.Module):
        self.new_cache = model.new_cache
        self.hidden = model.hidden
        self.logits = model.logits

    def serves(self, span: Span) -> bool:
        return True


class CallableDecoder:
    """A plain function of the whole text: no cache, and a window or blocks only where the callable itself has an
    argument `window` or `block`, a number of tokens.
    """

    cached = False

    def __init__(self, model: Callable[..., Any]):
        self._model = model

    def new_cache(self, batch_size: int, max_length: int) -> None:
        return None

    def serves(self, span: Span) -> bool:
        return all(_has_argument(self._model, name) for name in _sizes(span))

    def hidden(self, tokens: Tensor, cache: None = None, span: Span = FULL) -> Tensor:
        output = self._model(tokens, **_sizes(span))
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor) or logits.shape[:-1] != tokens.shape:
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise TypeError(
                f"the model must return logits [batch, seq, vocabulary] for tokens {tuple(tokens.shape)}, not {got}"
            )
        return logits

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


class TransformersDecoder:
    """A causal model of the transformers library, fed in chunks through its own cache.

    A table of absolute positions has no row beyond its end, and an index beyond it stops a GPU for the rest of the
    process: the table is found beforehand and such a length is refused with `PositionsExceeded`.
    """

    cached = True

    def __init__(self, model: nn.Module):
        self._model = model
        limit = getattr(model.config, "max_position_embeddings", None)
        tables = (
            module.num_embeddings
            for module in model.modules()
            if isinstance(module, nn.Embedding) and module is not model.get_input_embeddings()
        )
        self._max_positions = limit if limit is not None and any(rows >= limit for rows in tables) else None

    def new_cache(self, batch_size: int, max_length: int) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self._model.config)

    def serves(self, span: Span) -> bool:
        return span == FULL

    def hidden(self, tokens: Tensor, cache: Any = None, span: Span = FULL) -> Tensor:
        end = tokens.shape[1] + (cache.get_seq_length() if cache is not None else 0)
        if self._max_positions is not None and end > self._max_positions:
            raise PositionsExceeded(
                f"{type(self._model).__name__} has a table of {self._max_positions} positions; {end} were asked for"
            )
        return self._model(tokens, past_key_values=cache, use_cache=cache is not None).logits

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


def _sizes(span: Span) -> dict[str, int]:
    """The sizes that a span sets, by name."""
    return {name: size for name, size in asdict(span).items() if size is not None}


def _has_argument(function: Callable[..., Any], name: str) -> bool:
    target = function.forward if isinstance(function, nn.Module) else function
    try:
        return name in inspect.signature(target).parameters
    except (TypeError, ValueError):  # some built-in callables have no signature
        return False


def model_device(model: Any) -> torch.device:
    """The device of the model's first parameter; the CPU for a callable that has none."""
    parameters: Iterator[nn.Parameter] = model.parameters() if isinstance(model, nn.Module) else iter(())
    first = next(parameters, None)
    return torch.device("cpu") if first is None else first.device


@contextmanager
def inference(model: Any) -> Iterator[None]:
    """No gradients and no dropout inside; every submodule's training mode is put back at the end."""
    training = [module for module in model.modules() if module.training] if isinstance(model, nn.Module) else []
    if training:
        model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module in training:
            module.training = True
